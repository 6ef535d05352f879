"""Attention over sequences that are split over several ranks: DeepSpeed's Ulysses.

Each rank of a group holds one part of every sequence. Before attention, an all-to-all exchange
gives every rank the whole sequence for a part of the heads; after attention, another exchange
returns all heads of the rank's own part (https://arxiv.org/abs/2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.base.errors import CapabilityError
from rlhf.base.ranks import Ranks

Attention = Callable[..., tuple[Tensor, Tensor | None]]


def build_sequence_parallel_attention(
    attention: Attention, heads: tuple[int, int, int], *, ranks: Ranks, size: int, sequences: int
) -> Attention:
    """Return ``attention`` for sequences that are split over ``size`` consecutive ranks.

    ``heads`` are the numbers of query and of key-value heads, and the size of a head. Every rank
    must call this after DeepSpeed has started, and then run all layers on ``sequences`` sequences
    at once. The returned function has the arguments of transformers' attention interface, and
    ignores the mask, because attention is causal.
    """
    queries, keys, width = heads
    if queries % size or (keys % size and size % keys):
        raise CapabilityError(
            f"zero.sequence_parallel_size={size}: the model's {queries} attention heads and "
            f"{keys} key-value heads cannot be divided over {size} ranks; use a size that "
            "divides both"
        )
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    # DeepSpeed's register_with_transformers would replace "sdpa" for all models of the process.
    # It also reads num_key_value_heads, which the configs of OPT and GPT-NeoX lack.
    exchanged = UlyssesSPAttentionHF(
        attn=attention,
        batch_size=sequences,
        attn_head_count=queries,
        attn_head_size=width,
        kv_head_count=keys,
        num_hidden_layers=1,  # DeepSpeed reads the number of layers in a debugging mode only
        process_group=_create_group(ranks, size),
        seq_length_is_variable=True,
    )

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        # A dummy: DeepSpeed gathers position_ids, which only kernels for packed sequences read.
        options["position_ids"] = torch.zeros(1, 1, dtype=torch.long, device=query.device)
        found: tuple[Tensor, Tensor | None] = exchanged(module, query, key, value, None, **options)
        return found

    return attend


def _create_group(ranks: Ranks, size: int) -> Any:
    """Create the group of every ``size`` consecutive ranks, and return this rank's group."""
    starts = range(0, ranks.size, size)
    groups = [torch.distributed.new_group(list(range(s, s + size))) for s in starts]
    return groups[ranks.rank // size]
