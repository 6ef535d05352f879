"""Tiny models of every family that has a fused decoder, with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rlhf.base.errors import CapabilityError
from rlhf.models.build import build_actor
from rlhf.models.families import FAMILIES
from rlhf.models.sources import ModelSource
from rlhf.models.tokenizers import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 300  # tokens of the tokenizer: all bytes, and some more
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # far from uniform, so that a wrong token shows
    "bos_token_id": None,
}
# Variants of a family are named FAMILY-VARIANT.
MODELS: dict[str, dict[str, Any]] = {
    "gpt_neox": SMALL,
    "llama": SMALL | {"num_key_value_heads": 2},
    "mistral": SMALL | {"num_key_value_heads": 2},
    "opt": SMALL | {"ffn_dim": 96},
    "opt-350m": SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "qwen2": SMALL | {"num_key_value_heads": 2},
    "qwen3": SMALL | {"num_key_value_heads": 2, "head_dim": 32},
    "starcoder2": SMALL | {"num_key_value_heads": 2},
}


def fused_model_names() -> list[str]:
    """Return the names of the tiny models; they cover every family that has a fused decoder.

    Raises:
        CapabilityError: if a family with a fused decoder has no tiny model.
    """
    fused = {name for name, family in FAMILIES.items() if family.block is not None}
    if missing := fused - {name.partition("-")[0] for name in MODELS}:
        raise CapabilityError(f"no tiny model of {', '.join(sorted(missing))}: add it to MODELS")
    return list(MODELS)


def build_tiny_model(name: str) -> PreTrainedModel:
    """Build a model in fp32 on the CPU; all weights, also biases and norms, are random."""
    architecture = MODELS[name] | {"model_type": name.partition("-")[0]}
    source = ModelSource(key=name, path=None, architecture=architecture)
    model = build_actor(source, train_tokenizer(["a model"], vocab_size=VOCABULARY), seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model
