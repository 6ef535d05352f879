"""Models by tokens: log-probabilities of chosen tokens, or a value at every token.

Shapes: B = sequences, S = tokens, W = tokens of one rank's part of every sequence, N = chosen
tokens (of this part), H = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhf.base.errors import CapabilityError
from rlhf.base.types import LogprobOptions, SequenceBatch, TokenLogprobs, TokenModel, TokenPositions
from rlhf.models.families import family_of, find_decoder_modules
from rlhf.models.output_layer import DEFAULT_OPTIONS, fused_logprobs, token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARED = "shared"  # name under which the attention that exchanges parts is registered


class OutputLayer(nn.Linear):
    """An output layer that can return log-probabilities of given tokens without storing logits.

    The log-probabilities are computed inside ``forward``, because ZeRO-3 gathers the layer's weight
    only for its own forward and backward pass.
    """

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> OutputLayer:
        """Return an output layer that shares the parameters of ``linear``."""
        has_bias = linear.bias is not None
        layer = cls(linear.in_features, linear.out_features, bias=has_bias, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer

    def forward(  # type: ignore[override]
        self, hidden: Tensor, ids_N: Tensor | None = None, options: LogprobOptions = DEFAULT_OPTIONS
    ) -> Tensor | TokenLogprobs:
        """Return logits (..., V), or, given ``ids_N``, log-probs (N,) of the ids at ``hidden``."""
        if ids_N is None:
            return super().forward(hidden)
        return fused_logprobs(hidden, self.weight, self.bias, ids_N, options)


class LanguageModel(nn.Module):
    """A language model that returns log-probs of chosen tokens; checkpoints hold ``pretrained``.

    Sequences are padded on the right. In causal attention no token attends to the padding after it,
    so no mask is needed, and positions count from 0 in every row.
    """

    def __init__(self, pretrained: PreTrainedModel) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.is_plain = replace_output_layer(pretrained)

    def forward(
        self, ids_BS: Tensor, positions: TokenPositions, options: LogprobOptions = DEFAULT_OPTIONS
    ) -> TokenLogprobs:
        """Return log-probabilities (N,) and entropies (N,) of the tokens in ``positions``."""
        if not self.is_plain:
            return self._logprobs_from_logits(ids_BS, positions, options)
        hidden_BSH = self.pretrained.base_model(input_ids=ids_BS, use_cache=False).last_hidden_state
        return logprobs_at(self.pretrained.get_output_embeddings(), hidden_BSH, positions, options)

    def _logprobs_from_logits(
        self, ids_BS: Tensor, positions: TokenPositions, options: LogprobOptions
    ) -> TokenLogprobs:
        first = int(positions.columns_N.min()) if len(positions.columns_N) else ids_BS.shape[1] - 1
        logits_BUV = self.pretrained(
            input_ids=ids_BS, use_cache=False, logits_to_keep=ids_BS.shape[1] - first
        ).logits
        logits_NV = logits_BUV[positions.rows_N, positions.columns_N - first]
        return token_logprobs(logits_NV, positions.ids_N, options)


def logprobs_at(
    output: nn.Module, hidden_BSH: Tensor, positions: TokenPositions, options: LogprobOptions
) -> TokenLogprobs:
    """Apply the ``OutputLayer`` at ``positions`` only; return log-probs and entropies (N,)."""
    hidden_NH = hidden_BSH[positions.rows_N, positions.columns_N]
    found: TokenLogprobs = output(hidden_NH, positions.ids_N, options)
    return found


def replace_output_layer(pretrained: PreTrainedModel) -> bool:
    """Replace the output layer by an ``OutputLayer``; return False if the family forbids it."""
    output = pretrained.get_output_embeddings()
    if isinstance(output, OutputLayer):
        return True
    if not family_of(pretrained).has_plain_output or type(output) is not nn.Linear:
        return False
    pretrained.set_output_embeddings(OutputLayer.from_linear(output))
    return True


def kept_token_logprobs(model: TokenModel, batch: SequenceBatch) -> Tensor:
    """Return log-probabilities (N,) of the tokens that ``batch`` keeps in its loss, row by row.

    Tokens in column 0 are skipped, because no earlier token predicts them.
    """
    return model(
        batch.ids_BS, TokenPositions.from_batch(batch), LogprobOptions(with_entropy=False)
    ).logprobs_N


class Scorer(nn.Module):
    """A one-label classification model whose head is applied to every token, not only the last.

    The reward model's score is its value at the end token; the critic's values are taken before
    each response token. Both are saved as the Hugging Face folder of ``pretrained``.
    """

    def __init__(self, pretrained: PreTrainedModel) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.head_name = _head_name(pretrained)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Return fp32 values (B, S) of right-padded sequences: no token attends to the padding."""
        trunk = getattr(self.pretrained, self.pretrained.base_model_prefix)
        head = getattr(self.pretrained, self.head_name)
        hidden_BSH = trunk(input_ids=ids_BS, use_cache=False).last_hidden_state
        values_BS1: Tensor = head(hidden_BSH)
        return values_BS1.squeeze(-1).float()


def _head_name(pretrained: PreTrainedModel) -> str:
    heads: list[str] = [
        name
        for name, child in pretrained.named_children()
        if isinstance(child, nn.Linear) and child.out_features == 1
    ]
    if len(heads) == 1:
        return heads[0]
    raise CapabilityError(
        f"{type(pretrained).__name__} has no single linear head of one label beside its trunk "
        f"(children: {[name for name, _ in pretrained.named_children()]}); "
        "use a decoder such as OPT, Llama, Qwen, GPT-2 or Pythia"
    )


class SequenceShardModel(LanguageModel):
    """A ``LanguageModel`` that runs part ``part`` of ``parts`` of every sequence.

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
        # Padding gets the last position, since a table of learned positions may end there.
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


def head_counts(model: PreTrainedModel) -> tuple[int, int, int]:
    """Return the numbers of query and of key-value heads, and the size of a head."""
    parts = find_decoder_modules(model, tokens=0)
    assert parts is not None, "other models were refused"
    return parts.num_heads, parts.num_kv_heads, parts.head_dim


def attention_function_of(model: PreTrainedModel) -> Callable[..., Any]:
    """Return the attention function that ``model`` uses."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    return found


def set_attention_function(model: PreTrainedModel, attention: Callable[..., Any]) -> None:
    """Make ``model`` call ``attention``, without a mask, as its attention function."""
    from transformers import AttentionInterface

    AttentionInterface.register(SHARED, attention)
    model.set_attn_implementation(SHARED)
