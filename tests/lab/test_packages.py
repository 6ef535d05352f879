"""What messages say of the lab where it is not installed, and the lab that is."""

from dataclasses import fields

import pytest

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config import hydra_errors
from rlhf.config.hydra_errors import missing_package
from rlhf.methods import REWARDS, conf_folders, installed_methods


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
