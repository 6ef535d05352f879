"""Models that return log-probabilities of chosen tokens, or a value at every token.

Shapes: B = sequences, S = tokens, N = chosen tokens, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf.base.errors import CapabilityError
from rlhf.base.types import LogprobOptions, SequenceBatch, TokenLogprobs, TokenModel, TokenPositions
from rlhf.models.families import family_of
from rlhf.models.output_layer import (
    DEFAULT_OPTIONS,
    fused_logprobs,
    token_logprobs,
    unrounded_logits,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OutputLayer(nn.Linear):
    """An output layer that can return log-probabilities of given tokens without storing logits.

    The log-probabilities are computed inside ``forward``, because ZeRO-3 gathers the layer's weight
    only for its own forward and backward pass. With ``keeps_fp32``, logits are not rounded to 16
    bits, except logits (..., V) that autograd records.
    """

    keeps_fp32 = False  # a decoder of the same weights reads it too

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
        layer = (self.weight, self.bias)
        if ids_N is not None:
            return fused_logprobs(hidden, *layer, ids_N, options, keeps_fp32=self.keeps_fp32)
        if self.keeps_fp32 and not torch.is_grad_enabled():
            return unrounded_logits(hidden, *layer)
        return super().forward(hidden)


class LanguageModel(nn.Module):
    """A language model that returns log-probs of chosen tokens; saving writes ``pretrained``.

    Sequences are padded on the right. In causal attention no token attends to the padding after it,
    so no mask is needed, and positions count from 0 in every row. ``fp32_logits`` has no effect on
    a model that scales or caps its logits.
    """

    def __init__(self, pretrained: PreTrainedModel, *, fp32_logits: bool = False) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.is_plain = replace_output_layer(pretrained)
        if self.is_plain:
            pretrained.get_output_embeddings().keeps_fp32 = fp32_logits

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
        start = int(positions.columns_N.min()) if len(positions.columns_N) else ids_BS.shape[1] - 1
        logits_BUV = self.pretrained(
            input_ids=ids_BS, use_cache=False, logits_to_keep=ids_BS.shape[1] - start
        ).logits
        logits_NV = logits_BUV[positions.rows_N, positions.columns_N - start]
        return token_logprobs(logits_NV, positions.ids_N, options)


def logprobs_at(
    output: nn.Module, hidden_BSH: Tensor, positions: TokenPositions, options: LogprobOptions
) -> TokenLogprobs:
    """Apply the ``OutputLayer`` at ``positions`` only; return log-probs and entropies (N,)."""
    hidden_NH = hidden_BSH[positions.rows_N, positions.columns_N]
    logprobs: TokenLogprobs = output(hidden_NH, positions.ids_N, options)
    return logprobs


def replace_output_layer(pretrained: PreTrainedModel) -> bool:
    """Replace the output layer by an ``OutputLayer``; return False if that is not possible."""
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
    each response token. Both models are saved as ``pretrained``, in Hugging Face's format.
    """

    def __init__(self, pretrained: PreTrainedModel) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.head_name = _find_head_name(pretrained)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Return fp32 values (B, S) of right-padded sequences: no token attends to the padding."""
        base = getattr(self.pretrained, self.pretrained.base_model_prefix)
        head = getattr(self.pretrained, self.head_name)
        hidden_BSH = base(input_ids=ids_BS, use_cache=False).last_hidden_state
        values_BS1: Tensor = head(hidden_BSH)
        return values_BS1.squeeze(-1).float()


def _find_head_name(pretrained: PreTrainedModel) -> str:
    heads: list[str] = [
        name
        for name, child in pretrained.named_children()
        if isinstance(child, nn.Linear) and child.out_features == 1
    ]
    if len(heads) == 1:
        return heads[0]
    raise CapabilityError(
        f"{type(pretrained).__name__} has no separate one-label linear head next to its blocks "
        f"(children: {[name for name, _ in pretrained.named_children()]}); use a decoder such as "
        "OPT, Llama, Qwen, GPT-2 or Pythia"
    )
