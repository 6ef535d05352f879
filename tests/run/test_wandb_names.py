"""Under which names Weights & Biases keeps a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from omegaconf import DictConfig

from rlhf.config.freeze import to_run_config
from rlhf.run.trackers import build_tracker


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What wandb.init is called with."""
    given: dict[str, Any] = {}

    def init(**kwargs: Any) -> SimpleNamespace:
        given.update(kwargs)
        return SimpleNamespace(define_metric=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.setattr(wandb, "init", init)
    return given


NAMED = ["name=pets", "tracking.project=zoo", "tracking.entity=team", "tracking.tags=[a,b]"]


@pytest.mark.parametrize(
    ("run_dir", "group"),
    [("runs/pets/monday", "pets"), ("runs/sweeps/kl-1a2b/seed=1", "kl-1a2b")],
    ids=["alone", "job of a sweep"],
)
def test_names_are_those_of_the_config_and_the_sweep(
    run_dir: str,
    group: str,
    given: dict[str, Any],
    compose: Callable[[list[str]], DictConfig],
    tmp_path: Path,
) -> None:
    config = to_run_config(compose(["tracking=wandb_offline", *NAMED]))
    folder = tmp_path / run_dir
    folder.mkdir(parents=True)
    build_tracker(config, folder, is_main=True, say=[].append).finish()
    keys = ("project", "entity", "group", "job_type", "tags", "name", "mode")
    assert {key: given[key] for key in keys} == {
        "project": "zoo",
        "entity": "team",
        "group": group,
        "job_type": "sft+reward+ppo",
        "tags": ["a", "b"],
        "name": folder.name,
        "mode": "offline",
    }
