"""Packages with methods that are broken, foreign or missing; tests/lab has methods that work."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from rlhf import methods
from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.config.freeze import FROZEN, load_frozen_config, write_frozen_config
from rlhf.config.typed import to_run_config
from rlhf.methods import Method, MethodKeys, Part, classes_of, parts_of
from tests.conftest import Compose


@dataclass(kw_only=True)
class WithoutDefault(MethodKeys):
    size: int


@dataclass(kw_only=True)
class WithDefault(MethodKeys):
    size: int = 3


class NoMethod:
    name = "broken"


class OtherName(Method):
    name = "other"


class OtherGroup(Method):
    name = "broken"
    keys = {"model": MethodKeys}  # noqa: RUF012


class NeverOn(Method):
    name = "broken"
    keys = {"ppo": WithDefault}  # noqa: RUF012


class OnByDefault(NeverOn):
    off = {"ppo.size": 0}  # noqa: RUF012


class NoDefault(Method):
    name = "broken"
    keys = {"ppo": WithoutDefault}  # noqa: RUF012


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that replaces what is installed by entry points of these values."""

    def install(*values: str) -> None:
        entries = [EntryPoint("broken", value, methods.ENTRY_POINTS) for value in values]
        monkeypatch.setattr(methods, "entry_points", lambda group: entries)
        methods._find_methods.cache_clear()

    yield install
    methods._find_methods.cache_clear()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_package:Method", "No module named 'no_such_package'"),
        ("NoMethod", "is no subclass of rlhf.methods.Method"),
        ("OtherName", "name='other', and not the entry point's name"),
        ("OtherGroup", "keys has the group model; use data, reward, "),
        ("NoDefault", "'size'"),
        ("NeverOn", "it has keys, but neither off nor reward_kinds switches it on"),
        ("OnByDefault", "off has ppo.size=0, which is not the default of a key of it"),
    ],
)
def test_a_broken_method_is_named_in_one_line(
    value: str, reason: str, installed: Any, compose: Compose
) -> None:
    installed(value if ":" in value else f"{__name__}:{value}")
    with pytest.raises(ConfigError, match=r"^the method broken of ") as caught:
        to_run_config(compose([]))
    said = str(caught.value)
    assert reason in said
    assert "\n" not in said
    assert said.endswith("update the package, or pip uninstall a")


def test_two_packages_with_one_name_are_refused(installed: Any) -> None:
    installed(f"{__name__}:Working", f"{__name__}:Working")
    with pytest.raises(ConfigError, match="has this name too"):
        methods.refuse_broken_methods()


class Working(Method):
    name = "broken"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{sapo: rlhf-sapo 1.2}", "method sapo of rlhf-sapo 1.2, which is not installed; if you "),
        ("{sapo: [1]}", "methods does not map names to packages"),
        ("[sapo]", "methods does not map names to packages"),
        ("7", "methods does not map names to packages"),
    ],
)
def test_a_run_whose_method_is_missing_says_so(
    written: str, said: str, compose: Compose, tmp_path: Path
) -> None:
    write_frozen_config(to_run_config(compose([])), tmp_path)
    with (tmp_path / FROZEN).open("a") as file:
        file.write(f"methods: {written}\n")
    with pytest.raises(CheckpointError) as caught:
        load_frozen_config(tmp_path)
    assert said in str(caught.value)


class Costs(Part):
    pass


def test_a_part_of_another_kind_is_refused() -> None:
    assert parts_of(Costs, [None, part := Costs()]) == [part]
    assert classes_of(Costs, [None, Costs]) == [Costs]
    with pytest.raises(TypeError, match=r"must be a .*Costs"):
        parts_of(Costs, [Part()])
    for other in (Part, Costs()):
        with pytest.raises(TypeError, match=r"must be a .*Costs"):
            classes_of(Costs, [other])
