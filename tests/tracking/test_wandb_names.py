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
from rlhf.tracking.trackers import build_tracker


def test_project_team_group_and_tags_are_those_of_the_config(
    compose: Callable[[list[str]], DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def init(**kwargs: Any) -> SimpleNamespace:
        given.update(kwargs)
        return SimpleNamespace(define_metric=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.setattr(wandb, "init", init)
    named = ["name=pets", "tracking.project=zoo", "tracking.entity=team", "tracking.tags=[a,b]"]
    config = to_run_config(compose(["tracking=wandb_offline", *named]))
    (tmp_path / "monday").mkdir()
    build_tracker(config, tmp_path / "monday", is_main=True, say=[].append).finish()
    names = {key: given[key] for key in ("project", "entity", "group", "tags", "name", "mode")}
    assert names == {
        "project": "zoo",
        "entity": "team",
        "group": "pets",
        "tags": ["a", "b"],
        "name": "monday",
        "mode": "offline",
    }
