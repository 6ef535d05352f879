"""The model that SFT trains if several ranks share each sequence.

Shapes: B = sequences, S = tokens, W = tokens of one rank's part of every sequence, N = chosen
tokens of this part, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.base.errors import CapabilityError
from rlhf.base.ranks import Ranks
from rlhf.base.types import LogprobOptions, TokenLogprobs, TokenPositions
from rlhf.config.batches import BatchPlan
from rlhf.config.schema.run import RunConfig
from rlhf.models.families import find_decoder_modules
from rlhf.models.language_model import LanguageModel, logprobs_at
from rlhf.models.output_layer import DEFAULT_OPTIONS
from rlhf.options.sequence_parallel.ulysses import build_sequence_parallel_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARED = "shared"  # name under which transformers registers attention over shared sequences


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
