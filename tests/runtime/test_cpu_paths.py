"""Runs go on with every instruction set, and without a usable compiler or cache; they say so."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.base.cpu import MAX_ISA, ONEDNN_MAX_ISA, Isa, cap_onednn_isa, read_cpu
from rlhf.config.machine_rates import cpu_rates, store_rates
from tests.runs import ROOT, TINY_RUN, launch, soaked

pytestmark = pytest.mark.slow

SFT = [*TINY_RUN, "phase=sft", "hardware.dtype=bf16", "run_dir=run"]
LOWER = [level for level in Isa if level < read_cpu().isa]  # all other runs have this CPU's own


@pytest.fixture
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cap of the instruction sets, under which no run needs to measure the CPU."""
    monkeypatch.setenv(MAX_ISA, request.param)
    cap_onednn_isa()
    store_rates(replace(cpu_rates(), is_measured=True))
    os.environ.pop(ONEDNN_MAX_ISA, None)  # launch.py sets it, too
    return str(request.param)


def kernels_of(cwd: Path, *overrides: str, **environment: object) -> str:
    """Train an SFT model in bf16, which must succeed; return the line about the kernels."""
    run = launch(*SFT, *overrides, cwd=cwd, **environment)
    assert run.returncode == 0, run.stderr
    result = json.loads((cwd / "run" / "result.json").read_text())
    assert math.isfinite(result["objective"])
    return next(line for line in run.stdout.splitlines() if line.startswith("kernels: "))


@pytest.mark.parametrize(
    "level",
    soaked([each.name for each in LOWER], *(each.name for each in LOWER[:-1])),
    indirect=True,
)
def test_every_lower_level_of_this_cpu(level: str, tmp_path: Path) -> None:
    line = kernels_of(tmp_path, "sft.eval_examples=8")
    assert f"in C ({level})" in line
    assert ("torch instead of" in line) is (level == "none")


@pytest.mark.parametrize("level", soaked(["avx2", "none"], "none"), indirect=True)
def test_auto_is_fp32_without_denormal_numbers_under_a_cap(level: str, tmp_path: Path) -> None:
    auto = [word for word in TINY_RUN if not word.startswith("hardware.dtype")]
    auto += ["phase=sft", "run_dir=run", "tracking.others=[tests.killer:DenormalFinder]"]
    run = launch(*auto, cwd=tmp_path, PYTHONPATH=ROOT)
    assert run.returncode == 0, run.stderr
    assert "1 x cpu, fp32" in run.stdout
    names = "logprobs, softmax, decode" if level == "avx2" else "none"
    assert f"kernels: {names} in C ({level})" in run.stdout


def test_an_unknown_cap_is_refused(tmp_path: Path) -> None:
    run = launch(*SFT, cwd=tmp_path, RLHF_MAX_CPU_ISA="avx9")
    assert run.returncode == 2
    assert run.stderr.startswith("error: RLHF_MAX_CPU_ISA=avx9: must be one of none, avx2, ")
    assert list(tmp_path.iterdir()) == []


def test_neither_a_compiler_nor_a_cache(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    isa = read_cpu().isa.name  # even where these tests run capped
    where = {"RLHF_CACHE": "/proc/nowhere", "TMPDIR": tmp_path, "PATH": programs}
    cache = f"data.cache_dir={tmp_path / 'data'}"
    line = kernels_of(tmp_path, cache, RLHF_MAX_CPU_ISA=isa, **where)
    assert line.startswith(f"kernels: none in C ({isa}); torch instead of adamw")
    assert line.endswith("there is no C compiler; install gcc")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    (kept,) = result["phases"]["sft"]["replaced_kernels"]
    assert line.endswith(kept.removeprefix("kernels: "))
