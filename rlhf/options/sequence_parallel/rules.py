"""Rules for ranks that share each sequence, and their number."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import Phase
from rlhf.config.schema.model import refuse_compile
from rlhf.config.schema.run import RunConfig

SHARING_KEY = "zero.sequence_parallel_size"
# Values of model.attention that are causal without a mask: no rank has the mask of all tokens.
ATTENTIONS = (None, "matmul", "sdpa")


def check(config: RunConfig) -> None:
    """Check phases, ranks per node and attention if several ranks share each sequence."""
    size, per_node = config.zero.sequence_parallel_size, config.hardware.ranks_per_node
    if size == 1:
        return
    order, attention = config.phase.order, config.model.attention
    broken = {
        f" with phase.order=[{','.join(order)}]: only SFT shares sequences between ranks, because "
        "the other phases compare whole sequences or sample them on one rank; use phase=sft, then "
        "start the other phases with from_run and without this key; there, smaller micro-batches, "
        "model.gradient_checkpointing=true and zero=stage3 save memory": order != [Phase.sft],
        f" does not divide hardware.ranks_per_node={per_node}: the ranks that share a sequence "
        "must be on one node": per_node % size > 0,
        f" with model.attention={attention}: sequences are shared only with model.attention=matmul "
        "or sdpa; use one of them, or remove zero.sequence_parallel_size": (
            attention not in ATTENTIONS
        ),
    }
    refuse_broken_rule(broken, f"zero.sequence_parallel_size={size}")
    refuse_compile(config, "zero.sequence_parallel_size, which exchanges tokens")


def ranks_per_sequence(config: RunConfig) -> int:
    """Return the number of ranks that share each sequence."""
    return config.zero.sequence_parallel_size
