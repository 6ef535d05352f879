"""Rules for sampling with older weights, and during training."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.schema.keys import ANSWERING_PHASES
from rlhf.config.schema.run import RunConfig


def check_lag(config: RunConfig) -> None:
    """Check that a lag has measured log-probs, and an overlap has a lag and equal shares."""
    if not ANSWERING_PHASES(config) & set(config.phase.order):
        return
    rollout, rows = config.rollout, config.ppo.rollout_batch_size
    broken = {
        f"rollout.lag={rollout.lag} with rollout.backend={rollout.backend}: the sampling policy's "
        "log-probs are needed later, and this backend measures none; use rollout=fast, or "
        "rollout.lag=0": rollout.lag > 0 and not rollout.backend.measures_logprobs,
        "rollout.overlap=true with rollout.lag=0: each step then waits for the previous step's "
        "weights; use rollout.lag=1": rollout.overlap and rollout.lag == 0,
        f"rollout.samplers={rollout.samplers} with rollout.overlap=true does not divide "
        f"ppo.rollout_batch_size={rows}: each process samples an equal share; use a divisor": (
            rollout.overlap and rows % rollout.samplers != 0
        ),
    }
    refuse_broken_rule(broken)
