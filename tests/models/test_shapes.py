"""Weights are counted as transformers and peft make them, exactly."""

import json
import math
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from rlhf.base.decoder_modules import kv_cache_parameter_name
from rlhf.config.choices import ModelInit
from rlhf.config.schema.model import ModelConfig
from rlhf.models.build import ModelSource, build_actor
from rlhf.models.shapes import ModelShape, shape_of
from rlhf.options.lora.models import is_adapter_name
from tests.conftest import CONF
from tests.lora_settings import adding, lora_config
from tests.models_on_disk import small_tokenizer

SMALL = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT = SMALL | {"model_type": "opt", "ffn_dim": 40}
LLAMA = SMALL | {"model_type": "llama", "intermediate_size": 24}
QWEN3 = LLAMA | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 6}
NEOX = SMALL | {"model_type": "gpt_neox", "intermediate_size": 40}
GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_embd": 16, "n_layer": 2, "n_head": 4}
BLOOM = {"model_type": "bloom", "vocab_size": 96, "hidden_size": 16, "n_layer": 2, "n_head": 4}
MADE = {
    "opt": OPT,
    "opt_before_350m": OPT | {"word_embed_proj_dim": 8, "do_layer_norm_before": False},
    "opt_projected": OPT | {"word_embed_proj_dim": 8},
    "opt_no_final_norm": OPT | {"_remove_final_layer_norm": True},
    "opt_untied": OPT | {"tie_word_embeddings": False},
    "llama": LLAMA,
    "llama_grouped": LLAMA | {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama_biases": LLAMA | {"attention_bias": True, "num_key_value_heads": 1},
    "mistral": LLAMA | {"model_type": "mistral", "num_key_value_heads": 2},
    "qwen2": LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen3": QWEN3,
    "qwen3_biases": QWEN3 | {"attention_bias": True, "tie_word_embeddings": True},
    "olmo2": LLAMA | {"model_type": "olmo2", "num_key_value_heads": 2},
    "gemma3": QWEN3 | {"model_type": "gemma3_text"},
    "gemma3_untied": QWEN3 | {"model_type": "gemma3_text", "tie_word_embeddings": False},
    "gpt_neox": NEOX,
    "gpt_neox_tied": NEOX | {"tie_word_embeddings": True},
    "gpt2": GPT2,
    "gpt2_wide": GPT2 | {"n_inner": 50, "n_positions": 64, "tie_word_embeddings": False},
    "bloom": BLOOM,
    "bloom_old_names": {"model_type": "bloom", "vocab_size": 96, "n_embed": 16}
    | {"n_layer": 2, "num_attention_heads": 4},
}


def published() -> dict[str, dict[str, Any]]:
    """Architectures of conf/model; those with a trained tokenizer say how large it may be."""
    found = {}
    for path in sorted((CONF / "model").glob("*.yaml")):
        fields = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(fields, dict)
        if "architecture" in fields:
            found[path.stem] = {"vocab_size": fields["vocab_size"]} | fields["architecture"]
    return found


ARCHITECTURES = MADE | published()


def model(architecture: dict[str, Any], **changes: Any) -> ModelConfig:
    """The model of conf/model/tiny.yaml with another architecture."""
    files = [CONF / "base/model.yaml", CONF / "model/tiny.yaml"]
    fields = OmegaConf.to_container(OmegaConf.merge(*map(OmegaConf.load, files)))
    assert isinstance(fields, dict)
    del fields["defaults"]
    fields |= {"init": ModelInit.random, "architecture": architecture, "vocab_size": 96}
    return ModelConfig(**fields | changes)


def known_shape(architecture: dict[str, Any], **changes: Any) -> ModelShape:
    shape = shape_of(model(architecture, **changes))
    assert shape is not None
    return shape


def parameters(auto_class: Any, architecture: dict[str, Any], **fields: Any) -> int:
    from transformers import AutoConfig

    with torch.device("meta"):
        config = AutoConfig.for_model(**architecture | fields)
        module = auto_class.from_config(config)
        module.tie_weights()
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_are_those_of_transformers(name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    architecture = ARCHITECTURES[name]
    shape = known_shape(architecture)
    assert shape.weights == parameters(AutoModelForCausalLM, architecture)
    scorer = parameters(AutoModelForSequenceClassification, architecture, num_labels=1)
    assert shape.scorer_weights == scorer


@pytest.mark.parametrize("name", MADE)
def test_adapters_are_those_of_peft(name: str) -> None:
    tokenizer = small_tokenizer()
    architecture = MADE[name] | {"vocab_size": len(tokenizer)}
    source = ModelSource(key="model", path=None, architecture=architecture)
    spec = lora_config(rank=3, alpha=1.0)
    module = build_actor(source, tokenizer, seed=1, extensions=adding(spec))
    adapters = {n: p.numel() for n, p in module.named_parameters() if is_adapter_name(n)}
    shape = known_shape(architecture)
    assert shape.adapter_weights(3) == sum(adapters.values())
    learning = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert learning == sum(adapters.values())


@pytest.mark.parametrize("name", MADE)
def test_cache_and_products_are_those_of_transformers(name: str) -> None:
    """Every token is multiplied with all linear layers but the output's."""
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
    from transformers.pytorch_utils import Conv1D

    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MADE[name])).eval()
    cache, shape = DynamicCache(), known_shape(MADE[name])
    with torch.no_grad():
        argument = kv_cache_parameter_name(signature(module.forward).parameters)
        module(torch.zeros(2, 5, dtype=torch.long), use_cache=True, **{argument: cache})
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert held == 2 * 5 * shape.kv_elements_per_token
    layers = (each for each in module.modules() if each is not module.get_output_embeddings())
    matrices = [each.weight.numel() for each in layers if isinstance(each, nn.Linear | Conv1D)]
    assert shape.linear_layer_weights == sum(matrices)


def test_the_config_of_a_folder_counts_for_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for architecture in ({}, OPT, SMALL):
        loaded = model(architecture, init=ModelInit.pretrained, path=str(tmp_path))
        assert shape_of(loaded) == shape_of(model(LLAMA)) is not None
    elsewhere = model(OPT, init=ModelInit.pretrained, path="somebody/some-model")
    assert shape_of(elsewhere) == shape_of(model(OPT))


def test_a_trained_tokenizer_says_how_large_the_vocabulary_is() -> None:
    fields = {name: value for name, value in OPT.items() if name != "vocab_size"}
    assert known_shape(fields, vocab_size=123).vocab == 123


BROKEN = ["{", "[1]", "", "{}", '{"model_type": null}', '{"model_type": ["llama"]}', "[" * 100_000]
NO_SIZES = ["8", [8], {}, 0, -8, 8.5, math.nan, math.inf, 10**4000]


def test_a_config_that_is_broken_or_has_no_possible_sizes_has_no_shape(tmp_path: Path) -> None:
    fields = ("hidden_size", "num_attention_heads", "vocab_size")
    texts = [json.dumps(LLAMA | {field: size}) for field in fields for size in NO_SIZES]
    for text in [*BROKEN, *texts]:
        (tmp_path / "config.json").write_text(text)
        found = shape_of(model({}, init=ModelInit.pretrained, path=str(tmp_path)))
        assert found is None, text[:200]


@pytest.mark.parametrize(
    ("architecture", "path"),
    [
        ({"model_type": "mamba", "hidden_size": 8}, None),  # a family that is not known
        ({"model_type": "opt", "hidden_size": 8}, None),  # fields are missing
        ({}, None),
        ({}, "somebody/some-model"),  # a hub id that is not in the cache
        ({}, "a/b/c"),  # neither a folder nor a hub id
    ],
)
def test_what_is_not_known_has_no_shape(architecture: dict[str, Any], path: str | None) -> None:
    init = ModelInit.pretrained if path else ModelInit.random
    assert shape_of(model(architecture, init=init, path=path)) is None
