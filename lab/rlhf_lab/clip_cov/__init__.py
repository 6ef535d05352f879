"""Clip-Cov: exclude from the losses a few of the tokens that would most reduce the entropy.

https://arxiv.org/abs/2505.22617. It needs no memory and no time. Use it if the entropy falls early
in training and the score then stops rising. Do not use it if the policy should become certain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf.base.errors import ConfigError
from rlhf.config.schema.keys import FROM_0_TO_1, SCORE, key, needs
from rlhf.methods import Method, MethodKeys

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig
    from rlhf_lab.clip_cov.hooks import ClipCovHook

ON = needs("clip_cov_ratio", fix="add {key}=2e-4")


@dataclass(kw_only=True)
class ClipCovKeys(MethodKeys):
    """Keys of the group ``ppo`` for Clip-Cov."""

    clip_cov_ratio: float = key(FROM_0_TO_1, default=0.0)
    """Clip-Cov: share of tokens, but at least one, to leave out of a step's losses at random, among
    those whose log-prob and advantage have a high covariance (2e-4 in the paper); 0: none."""
    clip_cov_low: float = key(SCORE, default=1.0, unread=[ON])
    """Covariance of a token above which clip_cov_ratio may leave it out."""
    clip_cov_high: float = key(SCORE, default=5.0, unread=[ON])
    """Covariance of a token from which clip_cov_ratio never leaves it out."""


class ClipCov(Method):
    """Exclude from the losses a few of the tokens that would most reduce the policy's entropy."""

    name = "clip_cov"
    keys = {"ppo": ClipCovKeys}
    off = {"ppo.clip_cov_ratio": 0.0}

    def check(self, config: RunConfig) -> None:
        """Check that the lower limit of the covariances is below the upper limit."""
        keys = ClipCovKeys.of(config)
        if keys.clip_cov_low >= keys.clip_cov_high:
            raise ConfigError(
                f"ppo.clip_cov_high={keys.clip_cov_high:g}: must be above "
                f"ppo.clip_cov_low={keys.clip_cov_low:g}, or no token is ever left out; use the "
                "paper's 1 and 5"
            )

    def hook(self) -> type[ClipCovHook]:
        """Return the class of the hook that sets advantages to 0."""
        from rlhf_lab.clip_cov.hooks import ClipCovHook

        return ClipCovHook
