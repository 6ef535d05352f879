"""Rules for ``zero.sequence_parallel_size``: ranks that share each sequence."""

from __future__ import annotations

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig

ATTENTIONS = (None, "matmul", "sdpa")  # causal without a mask, which no rank has for all tokens


def check_sequence_parallel(config: RunConfig) -> None:
    """Check that only SFT runs, that groups of ranks are within nodes, and the attention."""
    size, per_node = config.zero.sequence_parallel_size, config.hardware.ranks_per_node
    if size == 1:
        return
    key = f"zero.sequence_parallel_size={size}"
    order = config.phase.order
    if order != [Phase.sft]:
        raise ConfigError(
            f"{key} with phase.order=[{','.join(order)}]: only SFT shares sequences between ranks, "
            "because the other phases compare whole sequences or sample them on one rank; use "
            "phase=sft, then start the other phases with from_run and without this key; there, "
            "smaller micro-batches, model.gradient_checkpointing=true and zero=stage3 save memory"
        )
    if per_node % size:
        raise ConfigError(
            f"{key} does not divide hardware.ranks_per_node={per_node}: the ranks that share a "
            "sequence must be on one node"
        )
    if config.model.attention not in ATTENTIONS:
        raise ConfigError(
            f"{key} with model.attention={config.model.attention}: sequences are shared only with "
            "model.attention=matmul or sdpa; use one of them, or remove zero.sequence_parallel_size"
        )
