"""Check that DeepSpeed's Hybrid Engine can run a model, by its config and by its outputs.

Shapes: N = rows that are compared, T = response tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.rollout.decoders.fused import TOLERANCES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

REASONS: Mapping[str, str] = read_yaml_beside(__file__, "unsupported_models.yaml")


def model_unsupported_reason(config: PreTrainedConfig) -> str | None:
    """Return why models of this config cannot be used, as the end of a sentence; None if they can.

    DeepSpeed's Llama layers compute one variant of Llama; with others they fail or compute wrongly.
    """
    if config.model_type != "llama":
        return REASONS.get(config.model_type, "has no layers in DeepSpeed's Hybrid Engine")
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    requirements: dict[str, tuple[Any, Any]] = {
        "num_key_value_heads": (config.num_key_value_heads, heads),
        "head_dim": (config.head_dim, config.hidden_size // heads),
        "hidden_act": (config.hidden_act, "silu"),
        "attention_bias": (config.attention_bias, False),
        "mlp_bias": (config.mlp_bias, False),
        "rope_type": (rope.get("rope_type", "default"), "default"),
    }
    for field, (value, supported) in requirements.items():
        if value != supported:
            return f"has {field}={value}, but DeepSpeed's Llama layers need {field}={supported}"
    return None


class Greedy(NamedTuple):
    """The result of greedy decoding: tokens (N, T) and their log-probabilities (N, T)."""

    ids_NT: Tensor
    logprobs_NT: Tensor


def describe_parity_failure(
    fast: Callable[[], Greedy], plain: Callable[[Tensor], Tensor], *, dtype: torch.dtype
) -> str | None:
    """Return a description of the first difference between ``fast`` and ``plain``, or None.

    ``plain`` returns the model's own log-probabilities (N, T, V) at the tokens that ``fast`` chose.
    So both read the same tokens, even after a near tie in which the model would choose another.
    """
    try:
        greedy = fast()
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"DeepSpeed's layers fail ({type(error).__name__}: {error})"
    plain_NTV = plain(greedy.ids_NT)
    allowed_NT = TOLERANCES[dtype] * plain_NTV.std(dim=-1)
    likeliest_NT = plain_NTV.max(dim=-1)
    logprob_NT = plain_NTV.gather(-1, greedy.ids_NT[..., None]).squeeze(-1)
    # Test for agreement and negate it below, so that NaN counts as a difference.
    same_token_NT = likeliest_NT.values - logprob_NT <= allowed_NT
    same_logprob_NT = (greedy.logprobs_NT - logprob_NT).abs() <= allowed_NT
    wrong = (~(same_token_NT & same_logprob_NT)).T.nonzero()
    if not len(wrong):
        return None
    token, row = wrong[0].tolist()
    place = f"at token {token} of response {row}"
    if not same_token_NT[row, token]:
        return (
            f"{place} greedy decoding takes {greedy.ids_NT[row, token]}, but the model's own "
            f"layers take {likeliest_NT.indices[row, token]}"
        )
    return (
        f"{place} the log-probability of {greedy.ids_NT[row, token]} is "
        f"{greedy.logprobs_NT[row, token]:.4f}, but {logprob_NT[row, token]:.4f} by the model's "
        f"own layers; the largest allowed difference is {allowed_NT[row, token]:.4f}"
    )
