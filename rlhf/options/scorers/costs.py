"""Costs of scorers: their weights, and the passes in which they score a rollout in turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import ModelInit, RewardKind
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.run import RunConfig
from rlhf.models.shapes import UnknownModelError, shape_of
from rlhf.models.sources import config_fields

if TYPE_CHECKING:
    from rlhf.models.model_uses import ModelUse


def list_scorers(config: RunConfig) -> Mapping[str, ModelConfig]:
    """Return the model of each part of ``rewards`` with kind=scorer, by its key rewards.NAME."""
    return {
        f"rewards.{name}": replace(
            config.model,
            init=ModelInit.pretrained,
            path=part.path,
            revision=part.revision,
            tokenizer=None,
            architecture={},
            attention=None,
            trust_remote_code=part.run_code,
        )
        for name, part in config.rewards.items()
        if part.kind == RewardKind.scorer
    }


def with_scorers(reward_model: ModelUse, config: RunConfig, *, is_used: bool) -> ModelUse:
    """Return PPO's frozen reward model with the weights of all scorers, which run after it.

    Unless ``is_used``, it only stands for the scorers: its shape is that of the first one or, if
    its family is unknown, of the policy. Each text counts as many tokens as the actor's.
    """
    scorers = list_scorers(config)
    total = sum(count_weights(key, model) for key, model in scorers.items())
    if not is_used:
        shapes = (shape_of(model, key=key) for key, model in scorers.items())
        reward_model = replace(reward_model, shape=next(shapes) or reward_model.shape)
        total -= reward_model.weights
    further = reward_model.successive_weights + total
    return replace(reward_model, successive_weights=further)


def count_weights(key: str, model: ModelConfig) -> int:
    """Return the weights of a scorer by the size of its files or, on the hub, by its config."""
    folder, fields = (
        expand_user_path(str(model.path), key=f"{key}.path"),
        config_fields(model, key=key),
    )
    dtype = str(fields.get("dtype") or fields.get("torch_dtype"))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size:
        return size // (2 if dtype.endswith("16") else 4)
    if (shape := shape_of(model, key=key)) is None:
        raise UnknownModelError(f"{key}.path={model.path} has no readable weights or config here")
    return shape.scorer_weights
