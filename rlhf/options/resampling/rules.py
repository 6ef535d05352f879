"""Rule for the estimators with which resampling makes sense."""

from __future__ import annotations

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Phase
from rlhf.config.schema.ppo import COMPARING
from rlhf.config.schema.run import RunConfig


def check(config: RunConfig) -> None:
    """Check that equal scores teach the estimator nothing, so that replacing prompts helps."""
    rounds, estimator = config.ppo.resampling_rounds, config.ppo.advantage_estimator
    if Phase.ppo in config.phase.order and rounds > 0 and estimator not in COMPARING:
        raise ConfigError(
            f"ppo.resampling_rounds={rounds}: {estimator} also learns from responses with equal "
            "scores; set ppo.resampling_rounds=0, or use "
            f"ppo.advantage_estimator={', '.join(COMPARING[:-1])} or {COMPARING[-1]}"
        )
