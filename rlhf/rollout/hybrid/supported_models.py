"""Models that DeepSpeed's Hybrid Engine can generate with, decided from their configs only.

docs/results.md describes how each reason was found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

UNFIT = "has layers in DeepSpeed that are not adapted to transformers 5 here"
REASONS = {
    "bloom": "is refused by DeepSpeed 0.19.8 under transformers later than 4.43.4",
    "gpt2": "has layers in DeepSpeed for inference only, not for its Hybrid Engine",
    "gpt_neo": UNFIT,
    "gpt_neox": "lacks in transformers 5 the attention attributes that DeepSpeed 0.19.8 reads",
    "gptj": UNFIT,
    "opt": "is skipped by DeepSpeed 0.19.8, whose OPT layers do not fit transformers 5's KV caches",
}


def model_unsupported_reason(config: PreTrainedConfig) -> str | None:
    """Return why models of this config cannot be used, as a text after the name, or None.

    DeepSpeed's Llama layers compute one variant of Llama; with another they fail or are wrong.
    """
    if config.model_type != "llama":
        return REASONS.get(config.model_type, "has no layers in DeepSpeed's Hybrid Engine")
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    wanted: dict[str, tuple[Any, Any]] = {
        "num_key_value_heads": (config.num_key_value_heads, heads),
        "head_dim": (config.head_dim, config.hidden_size // heads),
        "hidden_act": (config.hidden_act, "silu"),
        "attention_bias": (config.attention_bias, False),
        "mlp_bias": (config.mlp_bias, False),
        "rope_type": (rope.get("rope_type", "default"), "default"),
    }
    for field, (value, only) in wanted.items():
        if value != only:
            return f"has {field}={value}, and DeepSpeed's Llama layers support only {field}={only}"
    return None
