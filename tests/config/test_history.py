"""The history of keys and metrics is complete, and brings stored configurations up to date."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from rlhf.base import stored_files
from rlhf.base.errors import CheckpointError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.stored_files import METRICS
from rlhf.config import history
from rlhf.config.freeze import (
    FROZEN,
    load_config_to_continue,
    load_frozen_config,
    read_frozen_keys,
    write_frozen_config,
)
from rlhf.config.history import bring_up_to_date, present_name, read_history
from rlhf.config.hydra_errors import schema_types
from rlhf.config.run_dir import create_run_folder
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import flatten_keys, to_run_config
from rlhf.methods import REWARDS, defaults_of_methods, installed_methods
from rlhf.run.metric_table import METRICS as METRIC_TABLE
from rlhf.run.metric_table import metrics_of
from tests.conftest import Compose
from tests.needs_lab import needs_lab

ZOO = Path(__file__).parents[1] / "zoo"
FIRST = "04d4300"  # the commit whose keys are the first


def keys_of(schema: type = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of the schema, without groups; NAME stands for any name."""
    types = schema_types(schema)
    for key, kind in types.items():
        entry = get_args(kind)[1] if get_origin(kind) is dict else None
        if isinstance(entry, type) and hasattr(entry, "__dataclass_fields__"):
            yield from keys_of(entry, f"{prefix}{key}.NAME.")
        elif not any(other.startswith(f"{key}.") for other in types):
            yield prefix + key


def keys_of_methods() -> dict[str, Any]:
    """Return the defaults of the installed methods' keys, by dotted key."""
    defaults = flatten_keys(defaults_of_methods())
    for method in installed_methods():
        if (keys := method.keys.get(REWARDS)) is not None:
            defaults |= {f"{REWARDS}.NAME.{name}": value for name, value in vars(keys()).items()}
    return defaults


def first_keys() -> set[str]:
    groups = read_history()["keys"]["first"].items()
    return {f"{group}.{name}".lstrip(".") for group, names in groups for name in names}


def rows(section: Any) -> dict[str, Any]:
    return {key: content for of_version in section.values() for key, content in of_version.items()}


def test_every_key_has_a_row() -> None:
    """An added, renamed or removed key needs a row in the section of this name."""
    listed = first_keys() | rows(read_history()["keys"]["added"]).keys()
    expected = {*map(present_name, listed)} - {None}
    assert expected ^ (set(keys_of()) - keys_of_methods().keys()) == set(), "without a fitting row"


def test_rows_of_the_first_version_stay() -> None:
    stored = flatten_keys(yaml.safe_load((ZOO / FIRST / FROZEN).read_text()))
    stored = {key for key in stored if not key.startswith("model.architecture.")}
    listed = {key for key in first_keys() if "NAME" not in key}
    open_mappings = {"model.architecture", "data.sets", "rewards"}
    assert stored - open_mappings == listed - open_mappings


def test_values_of_added_keys_in_mappings_are_their_defaults() -> None:
    values = rows(read_history()["keys"]["added"])
    for key in (key for key in values if "NAME" in key):
        mapping, name = key.split(".NAME.")
        fields = get_args(schema_types()[mapping])[1].__dataclass_fields__
        assert name in fields
        assert values[key] in (fields[name].default, []), key


@needs_lab
def test_every_key_of_the_lab_has_a_row() -> None:
    assert read_history()["keys"]["packages"]["rlhf-lab"] == keys_of_methods()


def test_every_metric_has_a_row() -> None:
    table = read_history()["metrics"]
    added = {name for names in table["added"].values() for name in names}
    gone = {name for names in table["removed"].values() for name in names}
    new_names = rows(table["renamed"])
    listed = {new_names.get(name, name) for name in {*table["first"], *added} - gone}
    of_methods = {name for method in installed_methods() for name in metrics_of(method)}
    assert listed ^ (METRIC_TABLE.keys() - of_methods) == set(), "without a fitting row"


TABLE = read_yaml_beside(__file__, "small_history.yaml")


def unchanged(stored: dict[Any, Any]) -> bool:
    before = deepcopy(stored)
    return bring_up_to_date(stored).describe() == "" and stored == before


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "read_history", lambda: {"keys": TABLE})


@pytest.mark.usefixtures("planted")
def test_a_configuration_is_brought_up_to_date_in_words() -> None:
    stored = {
        "ppo": {"loss": "old", "far": False},
        "dpo": {"gone": 2, "loss": "kto"},
        "alarms": {"stop": ["odd", "even", "old"]},
        "parts": {"a": {"was": 3, "far": 0, "gone": 1}, 1: {"far": 1, "gone": 1}},
        1: {2: 3},
    }
    changes = bring_up_to_date(stored)
    assert stored == {
        "ppo": {"loss": "new", "better": 1},
        "dpo": {"loss": "sigmoid"},
        "alarms": {"stop": ["even"]},
        "parts": {"a": {"is": 3}, 1: {"far": 1}},
        "game": {"rules": "none"},
        "sft": {"newer": None},
        1: {2: 3},
    }
    assert changes.describe() == (
        "of 0.1.0: 3 keys set to their former behavior, ppo.loss=old is now ppo.loss=new, "
        "parts.NAME.was is now parts.NAME.is, dpo.gone=2 is gone: use dpo, "
        "dpo.loss=kto is gone: use marks, alarms.stop=odd is gone: use even, "
        "alarms.stop=old is gone: use new, parts.NAME.gone=1 is gone: drop it"
    )
    assert changes.lost["alarms.stop"] == ["odd", "even", "old"]
    assert unchanged(stored)


@pytest.mark.usefixtures("planted")
def test_a_value_without_an_effect_is_dropped_without_words() -> None:
    stored = {"ppo": {"new": 5}, "dpo": {"gone": 0}, "game": {"rules": "x"}, "sft": {"newer": 1}}
    changes = bring_up_to_date(stored)
    assert stored == {"ppo": {"better": 5}, "dpo": {}, "game": {"rules": "x"}, "sft": {"newer": 1}}
    assert changes.describe() == "of 0.2.0: ppo.new is now ppo.better"


@pytest.mark.usefixtures("planted")
def test_what_no_run_stores_stays_as_it_is() -> None:
    stored = {"ppo": 3, "game": {"rules": {"x": 1}}, "sft": None, "parts": [], "odd": {}}
    assert unchanged(stored)
    both = stored | {"ppo": {"new": 1, "better": 2}, "parts": {"a": {"was": 1, "is": {"x": 1}}}}
    assert unchanged(both)


def older(compose: Compose, folder: Path, **changes: object) -> Path:
    """Write a run of an older version, without keys that were added, and with ``changes``."""
    folder.mkdir()
    write_frozen_config(to_run_config(compose(["experiment=smoke"])), folder)
    cfg = OmegaConf.load(folder / FROZEN)
    assert isinstance(cfg, DictConfig)
    for key in ("trust_run", "environment", "fused_layers"):
        del cfg[key]
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value)
    OmegaConf.save(cfg, folder / FROZEN)
    return folder


def test_only_a_run_that_uses_removed_keys_cannot_continue(
    compose: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = older(compose, tmp_path / "plain", ppo__proximal_policy="step_start")
    config = load_config_to_continue(plain)
    assert config.fused_layers == "none", "as it was, not the default"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{plain / FROZEN}, of 0.1.0: ")
    assert line.endswith(" keys set to their former behavior")
    assert read_frozen_keys(plain)["fused_layers"] == "none"

    changed = older(compose, tmp_path / "changed", ppo__proximal_policy="interpolated")
    assert load_frozen_config(changed) == config
    assert read_frozen_keys(changed)["ppo.proximal_policy"] == "interpolated", "it is compared"
    message = r"changed: ppo\.proximal_policy=interpolated is gone: .* rlhf 0\.1\.0"
    for _ in range(2):
        with pytest.raises(CheckpointError, match=message):
            load_config_to_continue(changed)
    with pytest.raises(CheckpointError, match=message):
        create_run_folder(changed, config)

    muted = older(compose, tmp_path / "muted", alarms__mute=["critic_explodes"])
    assert load_config_to_continue(muted) == config
    assert read_frozen_keys(muted)["alarms.mute"] == ["critic_explodes"]


def test_metrics_have_their_present_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_files, "_renamed_metrics", lambda: {"ppo/old": "ppo/new"})
    (tmp_path / METRICS).write_text('{"phase": "ppo", "step": 1, "ppo/old": 0.5}\n')
    line = {"phase": "ppo", "step": 1, "ppo/new": 0.5}
    assert [*METRICS.read_lines(tmp_path)] == METRICS.follow(tmp_path).read().values == [line]
