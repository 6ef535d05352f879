"""Build the models that both PPO and DPO use: the policy to train and its reference.

Models start from an earlier phase of the run, or from a model that the configuration names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.base.errors import ConfigError
from rlhf.base.random_streams import seed_for
from rlhf.base.types import TokenEngine, TokenModel
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase
from rlhf.config.roles import Role, has_reward_model, reward_model_base
from rlhf.config.schema.run import RunConfig
from rlhf.methods import methods_in_use
from rlhf.models.build import build_actor, find_model_extensions
from rlhf.models.language_model import LanguageModel
from rlhf.models.pretrained import Shard, require_one_label_model
from rlhf.models.sources import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def policy_source(config: RunConfig) -> ModelSource:
    """Return the source of the SFT model: this run's folder, or the model of the key ``model``."""
    if Phase.sft in config.phase.order:
        return ModelSource.from_folder(_run_dir(config) / "sft" / "model", base=config.model)
    return ModelSource.from_config(config.model, key="model")


def reward_model_source(config: RunConfig) -> ModelSource:
    """Return the model from which the reward model starts: this run's SFT model, or a given one."""
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
    """Return the model from which the critic starts: the reward model, otherwise the SFT model.

    The reward model is the one that this run trains, or the model that ``reward_model`` names.

    Raises:
        CheckpointError: if the model that ``reward_model`` names has no trained one-label head.
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


def build_policy(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dropout: float,
    shard: Shard | None = None,
) -> LanguageModel:
    """Build the policy to train; ``shard`` shards its weights while they are loaded."""
    recompute = config.model.gradient_checkpointing
    source = replace(policy_source(config), dropout=dropout, gradient_checkpointing=recompute)
    return _build_language_model(config, Role.actor, source, tokenizer, shard)


def _build_language_model(
    config: RunConfig,
    role: Role,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    shard: Shard | None,
) -> LanguageModel:
    seed = seed_for(config.seed, "model")
    extensions = find_model_extensions(config, role, seed=seed)
    return LanguageModel(
        build_actor(source, tokenizer, seed=seed, extensions=extensions, shard=shard),
        fp32_logits=config.hardware.keeps_fp32_logits,
    )


def build_reference(
    config: RunConfig,
    phase: Phase,
    actor: TokenEngine,
    tokenizer: PreTrainedTokenizerBase,
    to_engine: Callable[[LanguageModel], TokenModel],
    *,
    shard: Shard | None = None,
) -> TokenModel:
    """Build the reference: a method's model, ``actor`` with adapters off, or the initial policy.

    ``to_engine`` wraps a new model in an engine; ``shard`` shards its weights while it is loaded.
    """
    source = policy_source(config)
    for method in methods_in_use(config):
        if (replacement := method.reference(config, phase)) is not None:
            key, path = f"{replacement[0]}_path", str(replacement[1].path)
            path = str(expand_user_path(path, key=key))
            source = replace(source, key=key, path=path, revision=None, architecture=None)
            break
    else:
        if config.lora.rank:
            from rlhf.options.lora.models import find_reference

            if (adapter_off := find_reference(config, actor)) is not None:
                return adapter_off
    return to_engine(_build_language_model(config, Role.reference, source, tokenizer, shard))
