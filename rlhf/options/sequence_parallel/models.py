"""The model that SFT trains if several ranks share each sequence, with DeepSpeed's Ulysses.

Before attention, an all-to-all exchange gives every rank the whole sequence for a part of the
heads; after attention, another exchange returns all heads of the rank's own part of the sequence
(https://arxiv.org/abs/2309.14509).

Shapes: B = sequences, S = tokens, W = tokens of one rank's part of every sequence, N = chosen
tokens of this part, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhf.base.errors import CapabilityError
from rlhf.base.ranks import Ranks
from rlhf.base.types import LogprobOptions, TokenLogprobs, TokenPositions
from rlhf.config.batches import BatchPlan
from rlhf.config.schema.run import RunConfig
from rlhf.models.families import find_decoder_modules
from rlhf.models.language_model import LanguageModel, logprobs_at
from rlhf.models.output_layer import DEFAULT_OPTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARED = "shared"  # name under which transformers registers attention over shared sequences
Attention = Callable[..., tuple[Tensor, Tensor | None]]


def build_sft_module(config: RunConfig, model: PreTrainedModel, ranks: Ranks) -> LanguageModel:
    """Return the module that trains this rank's part of every sequence."""
    size, tokens = config.zero.sequence_parallel_size, config.sft.max_tokens
    return SequenceShardModel(model, part=ranks.rank % size, parts=size, tokens=tokens)


def adapt_for_sft(config: RunConfig, model: PreTrainedModel, ranks: Ranks, plan: BatchPlan) -> None:
    """Replace the model's attention by an attention that exchanges tokens between ranks."""
    attention = build_sequence_parallel_attention(
        get_attention_function(model),
        count_heads(model),
        ranks=ranks,
        size=config.zero.sequence_parallel_size,
        sequences=plan.micro,
    )
    set_attention_function(model, attention)


class SequenceShardModel(LanguageModel):
    """A ``LanguageModel`` that runs only part ``part`` (from 0) of ``parts`` of each sequence.

    All ranks of a group get the same whole sequences. Each rank computes the log-probabilities of
    the chosen tokens that its part predicts, so the losses of the ranks add up to the whole loss.

    Raises:
        CapabilityError: if the model's family is unknown, has a sliding window below ``tokens``,
            or has rotary frequencies that change with the sequence length.
    """

    def __init__(self, pretrained: PreTrainedModel, *, part: int, parts: int, tokens: int) -> None:
        if find_decoder_modules(pretrained, tokens=tokens) is None:
            raise CapabilityError(
                f"zero.sequence_parallel_size={parts}: a model of model_type="
                f"{pretrained.config.model_type} with sft.max_tokens={tokens} cannot share "
                "sequences between ranks, which requires a known family without sliding windows "
                "and without rotary frequencies that change with the length; remove this key"
            )
        super().__init__(pretrained)
        self._part, self._parts = part, parts

    def forward(
        self, ids_BS: Tensor, positions: TokenPositions, options: LogprobOptions = DEFAULT_OPTIONS
    ) -> TokenLogprobs:
        """Return log-probabilities (N,) of the chosen tokens that this part predicts."""
        total = ids_BS.shape[1]
        width = -(-total // self._parts)
        first = self._part * width
        ids_BS = functional.pad(ids_BS, (0, self._parts * width - total))
        # Padding gets the last token's position, as a table of learned positions may end there.
        columns_W = torch.arange(first, first + width, device=ids_BS.device).clamp(max=total - 1)
        hidden_BWH = self.pretrained.base_model(
            input_ids=ids_BS[:, first : first + width],
            position_ids=columns_W.expand(len(ids_BS), -1),
            use_cache=False,
        ).last_hidden_state
        is_here = (positions.columns_N >= first) & (positions.columns_N < first + width)
        here = TokenPositions(*(part[is_here] for part in positions))
        here = here._replace(columns_N=here.columns_N - first)
        return logprobs_at(self.pretrained.get_output_embeddings(), hidden_BWH, here, options)


def count_heads(model: PreTrainedModel) -> tuple[int, int, int]:
    """Return the numbers of query and of key-value heads, and the size of a head."""
    parts = find_decoder_modules(model, tokens=0)
    assert parts is not None, "other models were refused"
    return parts.num_heads, parts.num_kv_heads, parts.head_dim


def get_attention_function(model: PreTrainedModel) -> Callable[..., Any]:
    """Return the attention function that ``model`` uses."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    return found


def set_attention_function(model: PreTrainedModel, attention: Callable[..., Any]) -> None:
    """Make ``model`` call ``attention``, without a mask, as its attention function."""
    from transformers import AttentionInterface

    AttentionInterface.register(SHARED, attention)
    model.set_attn_implementation(SHARED)


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
