"""The constraints of ``make test-lowest``, and the versions that ``constraints.txt`` pins."""

from __future__ import annotations

import re
import tomllib

import pytest

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


@pytest.mark.parametrize("target", ["run", "every-test"])
def test_a_run_installs_the_package_without_what_tests_need(target: str) -> None:
    """The site's packages needed Python 3.11.5, and kept Debian's 3.11.2 from a first run."""
    rules = (ROOT / "Makefile").read_text()
    needs = re.search(rf"^{target}: (.*)", rules, re.M)
    assert needs is not None
    stamp = {"run": "$(PACKAGE)", "every-test": "$(STAMP)"}[target]
    assert needs[1] == stamp
    recipe = rules.split(f"\n{stamp}: ")[1].split("\n\n")[0]
    assert ("[dev]" in recipe) == (target == "every-test")
