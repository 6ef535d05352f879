"""Build what PPO and DPO share: the trained policy and its reference.

Models start from an earlier phase of the run, or from a model in the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from rlhf.base.errors import ConfigError
from rlhf.base.random_streams import seed_for
from rlhf.base.types import (
    LogprobOptions,
    TokenEngine,
    TokenLogprobs,
    TokenPositions,
)
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase
from rlhf.config.roles import has_reward_model, reward_model_base
from rlhf.config.schema.run import RunConfig
from rlhf.models.build import build_actor, lora_spec
from rlhf.models.language_model import LanguageModel
from rlhf.models.pretrained import Shard, require_one_label_model
from rlhf.models.sources import ModelSource
from rlhf.options.lora.keys import LoraRole
from rlhf.options.lora.lora import disable_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def policy_source(config: RunConfig) -> ModelSource:
    """Return the source of the SFT model: this run's own, or the model that ``model`` names."""
    if Phase.sft in config.phase.order:
        return ModelSource.from_folder(_run_dir(config) / "sft" / "model", base=config.model)
    return ModelSource.from_config(config.model, key="model")


def reward_model_source(config: RunConfig) -> ModelSource:
    """Return the source of the reward model: this run's SFT model, or a model of the config."""
    key, base = reward_model_base(config)
    if key == "model" and Phase.sft in config.phase.order:
        source = ModelSource.from_folder(_run_dir(config) / "sft" / "model", base=base)
    else:
        source = ModelSource.from_config(base, key=key)
    return replace(
        source,
        dropout=config.reward_model.dropout,
        gradient_checkpointing=config.reward_model.gradient_checkpointing,
    )


def critic_source(config: RunConfig) -> ModelSource:
    """Return the source of the critic: the reward model, or the SFT model if there is none.

    The reward model is this run's own, or the model that ``reward_model`` names.

    Raises:
        CheckpointError: if the folder's model has no trained one-label head.
    """
    if not has_reward_model(config):
        return policy_source(config)
    if Phase.reward in config.phase.order:
        _, base = reward_model_base(config)
        return ModelSource.from_folder(_run_dir(config) / "reward" / "model", base=base)
    source = ModelSource.from_config(config.reward_model, key="reward_model")
    require_one_label_model(source)
    return source


def _run_dir(config: RunConfig) -> Path:
    if config.run_dir is None:
        raise ConfigError(
            "run_dir=null: the models of this run's earlier phases are loaded from run_dir; "
            "use the config.yaml that the launcher wrote, or phase=ppo with model.path and "
            "reward_model.path"
        )
    return Path(config.run_dir)


def trainable_policy_source(config: RunConfig, *, dropout: float) -> ModelSource:
    """Return the source of the policy to train: the SFT model, with settings for training."""
    return replace(
        policy_source(config),
        dropout=dropout,
        gradient_checkpointing=config.model.gradient_checkpointing,
    )


def build_policy(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dropout: float,
    shard: Shard | None = None,
) -> LanguageModel:
    """Build the policy, with adapters if ``config`` has any; ``shard`` shards it as it is built."""
    return LanguageModel(
        build_actor(
            trainable_policy_source(config, dropout=dropout),
            tokenizer,
            seed=seed_for(config.seed, "model"),
            lora=lora_spec(config.lora, LoraRole.actor),
            shard=shard,
        )
    )


def build_reference(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    teacher: str | None = None,
    *,
    shard: Shard | None = None,
) -> LanguageModel | None:
    """Build a copy of the initial policy; None if the policy without adapters can replace it.

    A ``teacher``, the folder or hub id of another model, replaces both.
    """
    spec, source = lora_spec(config.lora, LoraRole.actor), policy_source(config)
    if teacher is not None:
        key = "ppo.teacher_path"
        path = str(expand_user_path(teacher, key=key))
        source = replace(source, key=key, path=path, revision=None, architecture=None)
    elif spec is not None and not spec.train_rest:
        return None
    seed = seed_for(config.seed, "model")
    return LanguageModel(build_actor(source, tokenizer, seed=seed, shard=shard))


class AdapterOff:
    """A reference that is the policy with its adapters off; implements ``TokenModel``."""

    def __init__(self, engine: TokenEngine) -> None:
        self._engine = engine

    def __call__(
        self, ids_BS: Tensor, positions: TokenPositions, options: LogprobOptions, /
    ) -> TokenLogprobs:
        """Run the forward pass as if there were no adapters."""
        with disable_adapters(self._engine.module):
            return self._engine(ids_BS, positions, options)

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the module without adapters, dropout and gradients."""
        with disable_adapters(self._engine.module), self._engine.evaluating() as module:
            yield module
