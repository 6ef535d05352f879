"""What messages say of the lab where it is not installed, and the lab that is."""

import subprocess
import sys
from dataclasses import fields

import pytest

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config import hydra_errors
from rlhf.config.hydra_errors import missing_package
from rlhf.methods import REWARDS, conf_folders, installed_methods
from tests.runs import ROOT


def test_the_known_names_are_those_of_the_lab() -> None:
    names = {"ppo=" + path.stem for folder in conf_folders() for path in folder.glob("ppo/*.yaml")}
    for method in installed_methods():
        assert method.package.startswith("rlhf-lab ")
        names |= {f"rewards.NAME.kind={kind}" for kind in method.reward_kinds}
        for group, keys in method.keys.items():
            prefix = "rewards.NAME." if group == REWARDS else f"{group}."
            names |= {prefix + key.name for key in fields(keys)}  # type: ignore[arg-type]
    assert names == {*read_yaml_beside(hydra_errors.__file__, "packages.yaml")["rlhf-lab"]}


@pytest.mark.parametrize(
    "words",
    ["ppo.gdpo", "ppo.critic_check.every", "rewards.mine.onset", "rewards.a.kind=bias", "ppo=dapo"],
)
def test_a_missing_package_is_named(words: str) -> None:
    said = "belongs to rlhf-lab, which is not installed; pip install -e lab"
    assert missing_package(words) == said


def test_other_names_are_of_no_package() -> None:
    found = map(missing_package, ["ppo.gdp", "ppo.gdpos", "ppo=dap", "rewards.a.kind=model"])
    assert [*found] == [None] * 4


@pytest.mark.slow
def test_methods_are_found_whatever_is_imported_first() -> None:
    """A method's module may import the schema, which is imported to add the method's keys."""
    check = "import sys, rlhf.methods\nsys.exit(len(rlhf.methods._find_methods().faults))"
    first = ["config.schema.ppo", "config.roles", "config.batches", "options", "config.schema.run"]
    started = [
        subprocess.Popen([sys.executable, "-c", f"import rlhf.{name}\n{check}"], cwd=ROOT)
        for name in first
    ]
    assert [process.wait(60) for process in started] == [0] * len(first)
