"""A causal language model that is asked for the log-probabilities of some tokens, not for logits.

Shapes: B = sequences, S = tokens, N = picked tokens, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from rlhf.algorithms.logprobs import (
    PLAIN,
    Picks,
    Reading,
    TokenLogprobs,
    picked_logprobs,
    token_logprobs,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Families whose logits are the output layer of the last hidden state, and nothing more.
PLAIN_OUTPUT = (
    "bloom",
    "gemma",
    "gpt2",
    "gpt_neox",
    "gptj",
    "llama",
    "mistral",
    "olmo2",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "stablelm",
    "starcoder2",
)


class OutputLayer(nn.Linear):
    """A language model's output layer; given tokens too, it tells of them without their logits.

    That is done inside the layer's own call, for which ZeRO-3 gathers its weight, forwards and
    backwards.
    """

    @classmethod
    def of(cls, linear: nn.Linear) -> OutputLayer:
        """The layer over the very same parameters."""
        has_bias = linear.bias is not None
        layer = cls(linear.in_features, linear.out_features, bias=has_bias, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer

    def forward(  # type: ignore[override]
        self, hidden: Tensor, ids_N: Tensor | None = None, reading: Reading = PLAIN
    ) -> Tensor | TokenLogprobs:
        """Logits (..., V); what ``ids_N`` are given ``hidden`` (N, H) where there are ids."""
        if ids_N is None:
            return super().forward(hidden)
        return picked_logprobs(hidden, self.weight, self.bias, ids_N, reading)


class Policy(nn.Module):
    """Reads ``pretrained`` at picked tokens; saved is its ordinary Hugging Face folder.

    Sequences are padded on the right: causal attention never lets a token see what stands behind
    it, so that no mask is needed, and positions count from 0 in every row.
    """

    def __init__(self, pretrained: PreTrainedModel) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.is_plain = set_output_layer(pretrained)

    def forward(self, ids_BS: Tensor, picks: Picks, reading: Reading = PLAIN) -> TokenLogprobs:
        """Log-probabilities (N,) and entropies of the picked tokens."""
        if not self.is_plain:
            return self._from_logits(ids_BS, picks, reading)
        hidden_BSH = self.pretrained.base_model(input_ids=ids_BS, use_cache=False).last_hidden_state
        return read_tokens(self.pretrained.get_output_embeddings(), hidden_BSH, picks, reading)

    def _from_logits(self, ids_BS: Tensor, picks: Picks, reading: Reading) -> TokenLogprobs:
        first = int(picks.columns_N.min()) if len(picks.columns_N) else ids_BS.shape[1] - 1
        logits_BUV = self.pretrained(
            input_ids=ids_BS, use_cache=False, logits_to_keep=ids_BS.shape[1] - first
        ).logits
        logits_NV = logits_BUV[picks.rows_N, picks.columns_N - first]
        return token_logprobs(logits_NV, picks.ids_N, reading)


def read_tokens(
    output: nn.Module, hidden_BSH: Tensor, picks: Picks, reading: Reading
) -> TokenLogprobs:
    """What an ``OutputLayer`` makes of the last hidden state at the picked tokens."""
    hidden_NH = hidden_BSH[picks.rows_N, picks.columns_N]
    told: TokenLogprobs = output(hidden_NH, picks.ids_N, reading)
    return told


def set_output_layer(pretrained: PreTrainedModel) -> bool:
    """Put an ``OutputLayer`` in place where the family allows it; says whether it does."""
    output = pretrained.get_output_embeddings()
    if pretrained.config.model_type not in PLAIN_OUTPUT or type(output) is not nn.Linear:
        return False
    pretrained.set_output_embeddings(OutputLayer.of(output))
    return True
