"""Rule for the weights that the moving average can read."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig


def check_average(config: RunConfig) -> None:
    """Check that the fp32 weights that the average reads are in memory."""
    zero, beta = config.zero, config.ppo.ema_beta
    broken = {
        f"zero.nvme_path={zero.nvme_path} with ppo.ema_beta={beta}: the moving average reads the "
        "fp32 weights, which are on NVMe; use ppo.ema_beta=0, or remove zero.nvme_path": (
            zero.nvme_path is not None
            and zero.offload_optimizer
            and beta > 0
            and Phase.ppo in config.phase.order
        ),
    }
    refuse_broken_rule(broken)
