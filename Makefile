# make run [ARGS="experiment=smoke seed=2"] | test | check | lint | soak | papers | gpu | release | clean | test-newest | test-lowest
# Each sets its environment up first, if it is missing: run installs the package, the others also what tests need.
PYTHON ?= python3
BIN := .venv/bin
ENVIRONMENT := .venv/.made
PACKAGE := .venv/.installed-package
PINS := .venv/.pins
STAMP := .venv/.installed
# One worker for each core; a worker that has nothing left to do takes over tests of another.
WORKERS := -n logical --maxprocesses 8 --dist worksteal
PYTEST := $(BIN)/python -m pytest $(WORKERS)

# Bytecode is kept beside the environment, even where the user's shell forbids __pycache__: without
# it each new interpreter compiles torch and deepspeed again, for three seconds.
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/bytecode
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test check lint style types every-test soak papers gpu release clean test-newest test-lowest

run: $(PACKAGE)
	$(BIN)/python launch.py $(ARGS)

# Types are checked while the package is installed and the tests begin.
test: style
	$(MAKE) -j2 types every-test

check: lint $(STAMP)
	$(PYTEST) -m "not slow and not soak"

lint: style types

style: $(PINS)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(PINS)
	$(BIN)/mypy

every-test: $(STAMP)
	$(PYTEST) -m "not soak"

# A hundred SIGKILLs at random moments, every kind of run stopped in every phase, 150 random pairs of
# settings killed and resumed, a drive that fails at every file, the hashes of the weights of a run
# that samples beside training, hundreds of hostile inputs and 200 run folders of an attacker, planted
# regressions that a test must find, and on a pretended GPU every pair of
# settings, all parts of gpu_check, and the memory of every model of benchmarks/planner.md; 100
# cheats that rlhf_lab.verify must find, 30 honest runs that it must not accuse; all tests marked soak.
soak: $(STAMP)
	$(PYTEST) -m soak
	$(BIN)/python -m tests.pretend_cuda.memory --check
	$(BIN)/python -m tests.fuzz
	$(BIN)/python -m tests.fuzz --door "model fields" --cases 300
	$(BIN)/python -m tests.fuzz.foreign_runs
	$(BIN)/python -m tests.planted
	$(BIN)/python -m tests.mutants --faults 20
	$(BIN)/python -m tests.soak_drives
	$(BIN)/python -m tests.soak
	$(BIN)/python -m tests.soak_matrix
	$(BIN)/python -m tests.crossings
	$(BIN)/python -m tests.soak_verify
	$(BIN)/python -m tests.exact_ahead
	$(BIN)/python -m tests.soak_gpu

# Results of papers, measured again: make papers [QUICK=1] [ONLY="kl_gradients best_of_n"]
papers: $(STAMP)
	cd benchmarks && ../$(BIN)/python -m papers $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY))

# All that a GPU can answer, in calls of nine minutes: make gpu [ARGS="--model FOLDER --data FILE"]
gpu: $(STAMP)
	$(BIN)/python benchmarks/on_gpu.py runs/on_gpu $(ARGS)

# Wheels and source archives of what is committed, in dist/, installed and tried in another folder.
release: $(STAMP)
	$(BIN)/python tools/release.py

# Back to a fresh clone, except for runs/.
clean:
	rm -rf .venv .venv-newest .venv-lowest .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist *.egg-info lab/*.egg-info
	find rlhf lab tests -name __pycache__ -prune -exec rm -rf {} +

# The newest, or the lowest, versions that the bounds of pyproject.toml admit, in an environment of their own,
# which is made anew if the bounds change: make test-newest [SELECT="tests/rollout"]; rm -r .venv-newest renews it.
SELECT ?= -m "not slow and not soak"
ON_SMOKE = cd "$$(mktemp -d)" && $(CURDIR)/.venv-$*/bin/python $(CURDIR)/launch.py experiment=smoke

test-newest test-lowest: test-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest $(WORKERS) $(SELECT)
	$(ON_SMOKE)

.venv-newest/.installed: pyproject.toml lab/pyproject.toml
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --disable-pip-version-check --no-compile -e '.[dev]' -e lab
	touch $@

.venv-lowest/.installed: pyproject.toml lab/pyproject.toml tools/lowest_versions.py
	$(PYTHON) -m venv --clear .venv-lowest
	$(PYTHON) tools/lowest_versions.py > .venv-lowest/bounds.txt
	.venv-lowest/bin/python -m pip install --disable-pip-version-check --no-compile -c .venv-lowest/bounds.txt -e '.[dev]' -e lab
	touch $@

$(ENVIRONMENT): constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, but \"$(PYTHON)\" is: $$($(PYTHON) --version 2>&1)." \
	    "Name another: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@# This pip resolves the versions in half the time that the one of Python 3.11 takes.
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt pip
	touch $@

# Python compiles what it imports; pip would compile all of it, on one core.
INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt

$(PACKAGE): $(ENVIRONMENT) pyproject.toml lab/pyproject.toml
	$(INSTALL) -e . -e lab
	touch $@

# A third of the pins each, side by side: pip uses one core, and torch and triton are half of it all.
.PHONY: pins-0 pins-1 pins-2
pins-0 pins-1 pins-2: pins-%:
	$(INSTALL) --no-deps $$(awk '/==/ && NR % 3 == $*' constraints.txt)

$(PINS): $(ENVIRONMENT)
	$(MAKE) -j3 pins-0 pins-1 pins-2
	touch $@

$(STAMP): $(PINS) pyproject.toml lab/pyproject.toml
	$(INSTALL) --no-build-isolation -e '.[dev]' -e lab
	touch $(PACKAGE) $@
