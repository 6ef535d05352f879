"""Log-probabilities of whole responses from the logits of all positions."""

from torch import Tensor

from rlhf.algorithms import dpo
from rlhf.algorithms.sft import SftLoss, sft_loss
from rlhf.base.types import SequenceBatch, TokenPositions
from rlhf.models.output_layer import token_logprobs


def kept_logprobs(logits_BSV: Tensor, ids_BS: Tensor, keep_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N,) of the kept tokens that are predicted, and their rows."""
    picks = TokenPositions.from_batch(SequenceBatch(ids_BS, keep_BS, keep_BS))
    logits_NV = logits_BSV[picks.rows_N, picks.columns_N]
    return token_logprobs(logits_NV, picks.ids_N).logprobs_N, picks.rows_N


def sequence_logprobs(logits_BSV: Tensor, ids_BS: Tensor, keep_BS: Tensor) -> Tensor:
    """Sums (B,) over the kept tokens of each row."""
    return dpo.sequence_logprobs(*kept_logprobs(logits_BSV, ids_BS, keep_BS), num_rows=len(ids_BS))


def language_loss(logits_BSV: Tensor, ids_BS: Tensor, keep_BS: Tensor) -> SftLoss:
    """The loss of supervised fine-tuning on the kept tokens."""
    return sft_loss(kept_logprobs(logits_BSV, ids_BS, keep_BS)[0])
