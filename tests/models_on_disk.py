"""Tiny models of every family that is advertised, and some saved as a user would have them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhf.models.build import ModelSource, build_actor, build_scorer
from rlhf.models.tokenizers import train_tokenizer
from tests.architectures import sizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": SMALL | {"ffn_dim": 16, "word_embed_proj_dim": 8, "do_layer_norm_before": False},
    "llama": SMALL | {"intermediate_size": 16},
    "qwen3": SMALL | {"intermediate_size": 16, "head_dim": 8, "num_key_value_heads": 1},
    "gpt_neox": SMALL | {"intermediate_size": 16},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
}


def source_of(family: str, *, fields: dict[str, Any] | None = None, **options: Any) -> ModelSource:
    """A random model of ``family`` with two layers, some ``fields`` of its config changed."""
    architecture = {"model_type": family, **FAMILIES[family], **(fields or {})}
    return ModelSource(key="model", path=None, architecture=architecture, **options)


def small_tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["some words to learn from"], vocab_size=270)


def save_base(folder: Path, family: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Save a random model of ``family`` with its tokenizer; returns the model."""
    model = build_actor(source_of(family), tokenizer, seed=1).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def some_ids(batch: int = 2, tokens: int = 7) -> torch.Tensor:
    """Token ids without padding."""
    return torch.randint(2, 260, (batch, tokens), generator=torch.Generator().manual_seed(0))


def disturb(module: nn.Module, *, seed: int = 5, size: float = 0.3) -> None:
    """Add noise to all parameters that are trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def whole_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """What an engine gives: copies of parameters and persistent buffers."""
    persistent = module.state_dict().keys()
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named if name in persistent}


def save_models(folder: Path, *, policy: str, reward: str) -> None:
    """Save a tiny policy and a tiny reward model, with tokenizers trained on these texts."""
    architecture = sizes("llama", 8, 8, layers=1, heads=1)
    source = ModelSource(key="model", path=None, architecture=architecture)
    tokenizers = [train_tokenizer([text], vocab_size=262) for text in (policy, reward)]
    models = (
        build_actor(source, tokenizers[0], seed=1),
        build_scorer(source, tokenizers[1], seed=1).pretrained,
    )
    for name, model, tokenizer in zip(("policy", "reward"), models, tokenizers, strict=True):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
