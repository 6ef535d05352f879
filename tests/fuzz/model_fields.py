"""Odd fields in a model's config.json, of every family: right log-probabilities, or a refusal.

    python -m tests.fuzz --door "model fields" --cases 300

A model is built from a folder or from ``model.architecture``, and sampled as a run does. What is
sampled must have the log-probabilities of transformers' own forward pass, and the planner must
count the weights that there are.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlhf.base.types import SequenceBatch
from rlhf.config.choices import ModelInit
from rlhf.data.collate import collate_prompts
from rlhf.models.build import build_actor
from rlhf.models.language_model import LanguageModel, kept_token_logprobs
from rlhf.models.shapes import shape_of
from rlhf.models.sources import ModelSource
from rlhf.rollout.decoders.fused import TOLERANCES
from rlhf.rollout.sampling import SamplingSettings
from tests.fuzz.case import Case
from tests.models_on_disk import small_tokenizer
from tests.plain_engine import PlainEngine
from tests.rollout.decoder_checks import FAMILIES, fast_rollout

TOKENS, LENGTHS = 6, (5, 2, 9)
LLAMA = FAMILIES["llama"]
MORE = {
    "olmo2": LLAMA,
    "phi3": LLAMA,
    "stablelm": LLAMA,
    "falcon": FAMILIES["falcon"],
}
KINDS = {name: fields for name, fields in (FAMILIES | MORE).items() if name != "falcon-alibi"}
# GPT-2 has two names for these sizes, and each of both would be changed alone.
DOUBLE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
KINDS["gpt2"] = {name: value for name, value in KINDS["gpt2"].items() if name not in DOUBLE}
KINDS["bloom"] = {name: KINDS["bloom"][name] for name in KINDS["bloom"] if name not in DOUBLE[1:3]}
# Fields that other families have, which stay in a config.json by copying or conversion.
STRAY = {
    **{"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "use_sliding_window": False},
    **{"n_head": 2, "n_embd": 8, "rotary_pct": 0.5, "partial_rotary_factor": 0.5, "n_inner": 8},
    **{"attention_bias": True, "mlp_bias": True, "qkv_bias": True, "use_parallel_residual": False},
    **{"do_layer_norm_before": False, "word_embed_proj_dim": 8, "logit_scale": 0.1, "alibi": True},
    **{"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 64, "attention_multiplier": 0.1},
    **{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 500.0, "ffn_dim": 8},
    **{"attn_logit_softcapping": 5.0, "hidden_act": "relu", "activation_function": "gelu"},
    **{"layer_types": ["sliding_attention"] * 2, "tie_word_embeddings": True, "rotary_dim": 2},
    **{"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
    **{"max_window_layers": 0, "n_layer": 1, "layerdrop": 0.5, "scale_embedding": True},
    **{"layer_norm_elementwise_affine": False, "_remove_final_layer_norm": True, "num_kv_heads": 1},
    **{"multi_query": True, "new_decoder_architecture": True, "is_decoder": True},
    **{"enable_bias": False},
}
SIZES = ("heads", "head", "dim", "size", "embd", "inner", "layers", "window", "act", "rot", "rope")


@cache
def good_folder(kind: str) -> Path:
    """Return a folder with a random model of ``kind``, made once."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf-fuzz-"))
    build_actor(random_source(fields_of(kind)), small_tokenizer(), seed=1).save_pretrained(folder)
    return folder


def fields_of(kind: str) -> dict[str, Any]:
    return KINDS[kind] | {"model_type": kind.partition("-")[0], "vocab_size": 270}


def random_source(fields: Mapping[str, Any]) -> ModelSource:
    return ModelSource(key="model.architecture", path=None, architecture=dict(fields))


def odd_values(draw: Random, value: Any) -> Any:
    """Return another value for a field that has ``value``: another size, or another type."""
    odd: list[Any] = [None, True, False, 0, -1, 1, 3, "4", [], {}, 2.5, "gelu", 2**40]
    if isinstance(value, int | float) and not isinstance(value, bool):
        odd = [value * 2, value // 2, value + 1, float(value), *odd] * 2 + odd
    return draw.choice(odd)


def change_fields(draw: Random, fields: dict[str, Any]) -> str:
    """Change, remove or add one field; return what was done."""
    name = draw.choice([*(n for n in fields if any(part in n for part in SIZES)), *fields, *STRAY])
    way = draw.choice(["stray", "stray", "odd", "absent"])
    if name in ("model_type", "initializer_range"):  # large weights amplify rounding without bound
        return "nothing"
    if way == "absent" and name in fields and "hidden" not in name:  # the default is 4096 wide
        del fields[name]
        return f"{name} absent"
    value = STRAY.get(name) if way == "stray" else None
    fields[name] = odd_values(draw, fields.get(name, STRAY.get(name))) if value is None else value
    return f"{name}={json.dumps(fields[name])}"


def cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield models of all families with one to three odd fields."""
    while True:
        kind, is_folder = draw.choice(sorted(KINDS)), draw.random() < 0.5
        good = good_folder(kind)
        fields = json.loads((good / "config.json").read_text()) if is_folder else fields_of(kind)
        said = ", ".join(change_fields(draw, fields) for _ in range(draw.choice([1, 1, 2, 3])))
        source = random_source(fields)
        if is_folder:
            (folder / "model").mkdir(exist_ok=True)
            weights = folder / "model" / "model.safetensors"
            weights.unlink(missing_ok=True)
            weights.symlink_to(good / weights.name)
            (folder / "model" / "config.json").write_text(json.dumps(fields))
            source = ModelSource(key="model.path", path=str(folder / "model"))
        dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
        text = f"{kind}, {'folder' if is_folder else 'architecture'}, {dtype}: {said}"
        yield Case(text, partial(sample, source, dtype), must_refuse=False)


def sample(source: ModelSource, dtype: torch.dtype) -> None:
    """Sample from a model as a run does; compare with transformers' own model."""
    torch.manual_seed(0)
    model = build_actor(source, small_tokenizer(), seed=1).eval()
    check_shape(source, model)
    plain = model if source.path is None else load_plain(source.path)
    model.generation_config.eos_token_id = None
    ids = [torch.randint(3, 259, (n,)).tolist() for n in LENGTHS]
    draws_BT = torch.rand(len(ids), TOKENS)
    device = torch.device("cpu")
    sampling = SamplingSettings(max_tokens=TOKENS, temperature=1.0, top_k=0, top_p=1.0)
    prompts = collate_prompts(ids, [""] * len(ids), draws_BT, pad_id=0, device=device)
    with torch.no_grad():
        plain_ids = torch.tensor([ids[0]])
        reference = partial(plain, use_cache=False)
        before_TV = reference(input_ids=plain_ids).logits[0]
        actor = PlainEngine(LanguageModel(model))
        rollout = fast_rollout(sampling, dtype=dtype)
        found = rollout.generate(actor, prompts)
        depth = math.sqrt(model.config.num_hidden_layers / 2)  # rounding adds up
        spread = max(float(before_TV.log_softmax(-1).std()), 1.0) * max(depth, 1.0)
        for prompt, response, logprobs_T in zip(
            ids, found.ids_BT.tolist(), found.logprobs_BT, strict=True
        ):
            whole = torch.tensor([prompt + response])
            expected_TV = reference(input_ids=whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected_T = expected_TV.gather(1, torch.tensor(response)[:, None])[:, 0]
            keep = torch.arange(whole.shape[1])[None] >= len(prompt)
            batch = SequenceBatch(whole, torch.ones_like(keep), keep)
            trained_T = kept_token_logprobs(actor, batch)
            assert_near(trained_T, expected_T, 1e-4 * spread, "training")
            assert_near(logprobs_T, expected_T, TOLERANCES[dtype] * spread, "sampling")


def load_plain(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def assert_near(found_T: Tensor, expected_T: Tensor, allowed: float, what: str) -> None:
    error = float((found_T - expected_T).abs().max())
    assert error <= allowed, f"{what}: {error} beyond {allowed}: {found_T} {expected_T}"


def check_shape(source: ModelSource, model: Any) -> None:
    """The planner counts the model's matrices, or does not know its shape."""
    init = ModelInit.random if source.path is None else ModelInit.pretrained
    config: Any = SimpleNamespace(
        init=init, path=source.path, architecture=source.architecture or {}, vocab_size=270
    )
    shape = shape_of(config)
    weights = sum(parameter.numel() for parameter in model.parameters())
    # The planner reads no weights: it cannot know that a folder has an output layer all the same.
    if shape is None or shape.vocab < 270 or (source.path and model.config.tie_word_embeddings):
        return
    vectors = 4 * shape.layers * (shape.hidden + shape.ffn)  # biases, of which it counts the usual
    assert abs(shape.weights - weights) <= vectors, (shape, weights)
