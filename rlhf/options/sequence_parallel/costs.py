"""Costs of DeepSpeed-Ulysses: the exchanges between ranks before and after attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.models.model_uses import ModelUse
    from rlhf.plan.time_model import CostModel, ForwardWork

EXCHANGES = 5  # messages per layer: queries, keys, values, output and positions


def added_pass_bytes(model: ModelUse, *, sequences: int, tokens: int, size: int) -> int:
    """Return the bytes of attention's output before the exchange, which backward also needs."""
    layers = model.layers - model.checkpointed + (1 if model.checkpointed else 0)
    return layers * sequences * tokens * model.shape.heads * model.shape.head_dim * size


def added_pass_seconds(costs: CostModel, model: ModelUse, work: ForwardWork) -> float:
    """Return the seconds that the exchanges between ranks add to a pass.

    Each layer exchanges queries, keys and values before attention, and the output after it.
    """
    share, shape = costs.zero.sequence_parallel_size, model.shape
    size = costs.bytes_per_weight(model)
    per_token = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * size
    moved = work.tokens * per_token * (share - 1) / share
    latency = EXCHANGES * work.passes * costs.efficiency.message_seconds * math.log2(share)
    return shape.layers * (moved / (costs.machine.link * costs.efficiency.link) + latency)
