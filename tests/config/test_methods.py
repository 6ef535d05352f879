"""Packages with methods that are broken, foreign or missing; tests/lab has methods that work."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from rlhf import methods
from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.config import effects
from rlhf.config.effects import refuse_two_replacements
from rlhf.config.freeze import FROZEN, load_frozen_config, write_frozen_config
from rlhf.config.schema.keys import Unread
from rlhf.config.typed import to_run_config
from rlhf.methods import Method, MethodKeys, Part, classes_of, parts_of
from rlhf.run.metric_table import _parse_groups, _parse_panels, panels_for_metrics
from tests.conftest import Compose


@dataclass(kw_only=True)
class WithoutDefault(MethodKeys):
    size: int


@dataclass(kw_only=True)
class WithDefault(MethodKeys):
    num_things: int = 3


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
    off = {"ppo.num_things": 0}  # noqa: RUF012


@dataclass(kw_only=True)
class UnknownType(MethodKeys):
    num_things: "Sise" = 3  # type: ignore[name-defined] # noqa: F821


class Misspelt(NeverOn):
    off = {"ppo.num_things": 3}  # noqa: RUF012
    keys = {"ppo": UnknownType}  # noqa: RUF012


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
        ("NoMethod", "is not a subclass of rlhf.methods.Method"),
        ("OtherName", "name='other', and not the entry point's name"),
        ("OtherGroup", "keys has the group model; use data, reward, "),
        ("NoDefault", "'size'"),
        ("NeverOn", "keys is set, but off and reward_kinds are empty: nothing switches it on"),
        ("Misspelt", "name 'Sise' is not defined"),
        ("OnByDefault", "off has ppo.num_things=0: no key of the method has this default"),
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
    ("name", "parse", "text", "reason"),
    [
        ("metrics.yaml", _parse_groups, "A: {a/b: {unit: nats}}", "missing 3 required"),
        ("metrics.yaml", _parse_groups, "A: {a/b: {unti: nats}}", "argument 'unti'"),
        ("metrics.yaml", _parse_groups, "[a/b]", "no attribute 'items'"),
        ("panels.yaml", _parse_panels, "A: [ppo/x]", "no attribute 'items'"),
        ("panels.yaml", _parse_panels, "A: {", "expected node content"),
    ],
)
def test_a_misspelt_table_of_a_package_is_named_in_one_line(
    name: str, parse: Any, text: str, reason: str, installed: Any, tmp_path: Path
) -> None:
    installed(f"{__name__}:Working")
    (method,) = methods.installed_methods()
    (tmp_path / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Method, "folder", tmp_path)
        assert methods.read_table(method, name, parse) == {}
    with pytest.raises(ConfigError, match=rf"^the method broken of .*{name}: .*{reason}") as caught:
        methods.refuse_broken_methods()
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="the method broken of"):
        panels_for_metrics([])


@pytest.mark.usefixtures("installed")
def test_two_methods_that_replace_the_same_are_refused(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(Method):
        name = "other"
        unread = dict.fromkeys(
            ["ppo.cliprange"], Unread(("ppo.gamma",), lambda x: x < 1, "{key}=1")
        )

    class Third(Other):
        name = "third"

    config = to_run_config(compose([]))
    for gamma, used in ((0.9, [Other()]), (1.0, [Other(), Third()])):
        monkeypatch.setattr(effects, "methods_in_use", lambda _, used=used: used)
        refuse_two_replacements(replace(config, ppo=replace(config.ppo, gamma=gamma)))
    said = r"^the methods other and third both replace what ppo\.cliprange sets.*ppo\.gamma=1$"
    with pytest.raises(ConfigError, match=said):
        refuse_two_replacements(replace(config, ppo=replace(config.ppo, gamma=0.9)))


def test_keys_that_no_group_has_are_an_error(compose: Compose) -> None:
    with pytest.raises(TypeError, match="no group has the keys of WithDefault"):
        WithDefault.of(to_run_config(compose([])))


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
