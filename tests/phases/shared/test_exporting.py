"""Weights for other programs, which may run as another user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig

from rlhf.config.freeze import to_run_config
from rlhf.models.build import build_actor
from rlhf.phases.shared.exporting import write_weights
from tests.models_on_disk import small_tokenizer, source_of


def test_a_server_of_another_user_can_read_the_weights(
    tmp_path: Path, compose: Callable[[list[str]], DictConfig]
) -> None:
    model = build_actor(source_of("opt"), small_tokenizer(), seed=1)
    engine: Any = SimpleNamespace(module=SimpleNamespace(pretrained=model))
    engine.stream_state = lambda tensors: iter(tensors.items())
    tmp_path.chmod(0o750)
    write_weights(to_run_config(compose([])), engine, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640
