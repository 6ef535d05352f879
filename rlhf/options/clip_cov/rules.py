"""Rule for the range of covariances of Clip-Cov."""

from __future__ import annotations

from rlhf.base.errors import ConfigError
from rlhf.config.schema.run import RunConfig


def check(config: RunConfig) -> None:
    """Check that some covariance lies in the range."""
    low, high = config.ppo.clip_cov_low, config.ppo.clip_cov_high
    if low >= high:
        raise ConfigError(
            f"ppo.clip_cov_high={high:g}: must be above ppo.clip_cov_low={low:g}, or no token is "
            "ever left out; use the paper's 1 and 5"
        )
