"""Rules for the config group ``reward``: what the loss reads, and ensembles."""

from __future__ import annotations

from rlhf.base.errors import ConfigError, refuse_first
from rlhf.config.choices import LoraRole, Phase, RewardLossName, Source
from rlhf.config.roles import SHARDED_WEIGHTS, Role, has_reward_model, stage_of
from rlhf.config.schema.run import RunConfig
from rlhf.config.schema.supervised import RewardConfig


def check_reward(config: RunConfig) -> None:
    """Check what the reward model's loss reads, and that its members suit the run.

    Members need a reward model that scores, whole weights, and no adapters.
    """
    if Phase.reward in config.phase.order:
        _check_loss(config.reward, config.data.source)
    if config.reward.members == 1:
        return
    best, sequence_ranks = config.checkpoint.best, config.zero.sequence_parallel_size
    stages = {stage_of(role, config.zero) for role in (Role.reward_training, Role.reward)}
    broken = {
        ": this run has no reward model, only rules or a judge; set reward.members=1, or add "
        "rewards.model={kind: model}": not has_reward_model(config),
        f" with checkpoint.best={best}: the further members learn after the first, and no earlier "
        "step has all of them; set checkpoint.best=null": (best or "").startswith("reward/"),
        " with adapters on the reward model: each member trains its own top layers, and the layers "
        "below are frozen; remove reward from lora.roles, or set reward.members=1": (
            config.lora.rank > 0 and LoraRole.reward in config.lora.roles
        ),
        " with sharded weights (ZeRO stage 3): members start from hidden states of the first "
        "member's layers; use zero=stage2, or set reward.members=1": SHARDED_WEIGHTS in stages,
        f" with zero.sequence_parallel_size={sequence_ranks}: members are not divided over "
        "sequences; set reward.members=1": sequence_ranks > 1,
    }
    refuse_first(broken, f"reward.members={config.reward.members}")


def _check_loss(reward: RewardConfig, source: Source) -> None:
    """Check that the loss has the columns that it reads, and no option that it does not read."""
    columns = reward.score_columns
    is_regression = reward.loss is RewardLossName.regression
    key = "label_smoothing" if reward.margin_column is None else "margin_column"
    broken = {
        f"reward.loss=regression with reward.score_columns={columns}: it needs two columns with "
        "numbers, such as reward.score_columns=[score_chosen,score_rejected]": (
            is_regression and len(columns or ()) != 2  # noqa: PLR2004
        ),
        f"reward.score_columns={columns}: only reward.loss=regression reads them; add "
        "reward.loss=regression, or use reward.margin_column": (
            columns is not None and not is_regression
        ),
        f"reward.{key}={getattr(reward, key)}: a squared error has none; remove it, or use "
        "reward.loss=end": (
            is_regression and (reward.margin_column is not None or reward.label_smoothing > 0)
        ),
        f"reward.label_noise={reward.label_noise}: reward.loss=regression reads scores, not which "
        "answer was preferred; remove it, or use reward.loss=end": (
            is_regression and reward.label_noise > 0
        ),
    }
    refuse_first(broken)
    wanted = [*(columns or ()), *filter(None, [reward.margin_column])]
    if wanted and source in (Source.synthetic, Source.environment):
        key = "margin_column" if columns is None else "score_columns"
        raise ConfigError(
            f"reward.{key}: data=synthetic and environments have no column {wanted[0]}; use "
            "data=local data.path=FILE"
        )
