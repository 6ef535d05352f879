"""The presets of ppo, sft, reward and dpo have the values of what they name."""

from pathlib import Path
from typing import Any

import pytest

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.batches import batch_plans, rollout_plan
from rlhf.config.typed import to_run_config
from rlhf.methods import conf_folders
from tests.conf_headers import read_header
from tests.conftest import Compose
from tests.needs_lab import needs_lab

CONF = Path(__file__).parents[2] / "conf"
PRESETS: dict[str, dict[str, Any]] = read_yaml_beside(__file__, "presets.yaml")
FILES = {
    f"{group}={path.stem}": path
    for group in ("ppo", "sft", "reward", "dpo")
    for folder in (CONF, *conf_folders())
    for path in (folder / group).glob("*.yaml")
    if path.stem != "default"
}


@needs_lab
def test_every_preset_has_its_row() -> None:
    assert set(FILES) == set(PRESETS)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_preset(preset: str, compose: Compose) -> None:
    group, expected = preset.partition("=")[0], PRESETS[preset]
    gpus = 7 if preset == "ppo=trlx_hh" else 8  # whose eighth has the reward model
    words = [preset, "hardware=8xa100_80g", f"hardware.ranks_per_node={gpus}", "model=opt_125m"]
    words += ["phase=pipeline_dpo" if group == "dpo" else "phase=pipeline"]
    if group == "ppo":
        words += [f"{phase}.batch_size={4 * gpus}" for phase in ("sft", "reward")]
    composed = compose(words)
    assert {key: composed[group][key] for key in expected} == expected
    config = to_run_config(composed)
    if group == "ppo":
        assert rollout_plan(config).per_rank * gpus == expected["rollout_batch_size"]
        mini_batch = batch_plans(config)[config.phase.order[-1]].per_rank * gpus
        assert mini_batch == expected["mini_batch_size"]


@pytest.mark.parametrize("preset", FILES)
def test_every_preset_names_its_source(preset: str) -> None:
    path, group = FILES[preset], preset.partition("=")[0]
    assert "https://" in str(read_header(path).source)
    assert f"defaults: [/base/{group}@_here_, _self_]" in path.read_text().splitlines()
