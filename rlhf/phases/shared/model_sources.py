"""Sources of each phase's models: an earlier phase of the run, or a model in the configuration."""

from __future__ import annotations

from pathlib import Path

from rlhf.config.choices import Phase
from rlhf.config.roles import has_reward_model, reward_model_base
from rlhf.config.schema.run import RunConfig
from rlhf.errors import ConfigError
from rlhf.models.pretrained import require_trained_head
from rlhf.models.sources import ModelSource


def policy_source(config: RunConfig) -> ModelSource:
    """Return the source of the SFT model: this run's own, or the model that ``model`` names."""
    if Phase.sft in config.phase.order:
        return ModelSource.folder(_run_dir(config) / "sft" / "model", base=config.model)
    return ModelSource.of(config.model, key="model")


def critic_source(config: RunConfig) -> ModelSource:
    """Return the source that the critic starts from: the reward model, or SFT's without one.

    The reward model is this run's own, or the model that ``reward_model`` names.

    Raises:
        CheckpointError: if the folder's model has no trained one-label head.
    """
    if not has_reward_model(config):
        return policy_source(config)
    if Phase.reward in config.phase.order:
        _, base = reward_model_base(config)
        return ModelSource.folder(_run_dir(config) / "reward" / "model", base=base)
    source = ModelSource.of(config.reward_model, key="reward_model")
    require_trained_head(source)
    return source


def _run_dir(config: RunConfig) -> Path:
    if config.run_dir is None:
        raise ConfigError(
            "run_dir=null: the models of this run's earlier phases are loaded from run_dir; "
            "use the config.yaml that the launcher wrote, or phase=ppo with model.path and "
            "reward_model.path"
        )
    return Path(config.run_dir)
