"""Rules for where the moving average can be stored, and which weights it can read."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig


def check(config: RunConfig) -> None:
    """Check that an offloaded average exists, and that the fp32 weights it reads are in memory."""
    zero, beta = config.zero, config.ppo.ema_beta
    broken = {
        f"zero.offload_ema=true with ppo.ema_beta={beta}: there is no moving average; add "
        "ppo.ema_beta=0.992, or remove zero.offload_ema": zero.offload_ema and not beta,
        f"zero.nvme_path={zero.nvme_path} with ppo.ema_beta={beta}: the moving average reads the "
        "fp32 weights, which are on NVMe; use ppo.ema_beta=0, or remove zero.nvme_path": (
            zero.nvme_path is not None
            and zero.offload_optimizer
            and beta > 0
            and Phase.ppo in config.phase.order
        ),
    }
    refuse_broken_rule(broken)
