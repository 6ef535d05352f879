"""The constraints of ``make test-lowest``, and the versions that ``constraints.txt`` pins."""

import re
import tomllib

from tests.runs import ROOT
from tools.lowest_versions import PYPROJECT, lowest_versions


def parts_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def pins_of() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_every_dependency_has_a_lower_bound_that_the_pin_reaches() -> None:
    text = PYPROJECT.read_text(encoding="utf-8")
    lowest = dict(line.split("==") for line in lowest_versions(text))
    assert len(lowest) == len(tomllib.loads(text)["project"]["dependencies"])
    pins = dict(line.lower().split("==") for line in pins_of())
    for name, bound in lowest.items():
        assert parts_of(bound) <= parts_of(pins[name.lower()]), name


def test_a_run_installs_the_package_without_what_tests_need() -> None:
    """The site's packages needed Python 3.11.5, and kept Debian's 3.11.2 from a first run."""
    rules = (ROOT / "Makefile").read_text()
    for needs in ("run: $(PACKAGE)", "check: lint $(STAMP)", "every-test: $(STAMP)"):
        assert f"\n{needs}\n" in rules
    for stamp, installs_dev in (("$(PACKAGE)", False), ("$(STAMP)", True)):
        recipe = rules.split(f"\n{stamp}: ")[1].split("\n\n")[0]
        assert "$(INSTALL)" in recipe
        assert ("[dev]" in recipe) is installs_dev
