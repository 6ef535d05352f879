"""Model and tokenizer folders that are damaged, incomplete or of another model are refused."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf.errors import CheckpointError
from rlhf.models.build import ModelSource, build_actor, build_scorer
from rlhf.models.load_checks import check_files
from rlhf.models.lora import LoraSpec
from rlhf.models.tokenizers import load_tokenizer
from tests.models_on_disk import FAMILIES, save_base, small_tokenizer, source_of

TOKENIZER = small_tokenizer()
WEIGHTS = "model.safetensors"
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    save_base(folder, "llama", TOKENIZER)
    return folder


def damaged(
    good: Path,
    folder: Path,
    change: Callable[[Weights], Weights] = dict,
    **fields: Any,
) -> ModelSource:
    """A copy of ``good`` with other weights, or other fields in its config."""
    place = folder / "bad"
    shutil.copytree(good, place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | fields))
    save_file(change(load_file(good / WEIGHTS)), place / WEIGHTS, metadata={"format": "pt"})
    return ModelSource(key="model.path", path=str(place))


def without(*endings: str) -> Callable[[Weights], Weights]:
    return lambda weights: {n: w for n, w in weights.items() if not n.endswith(endings)}


def broken(value: float) -> Callable[[Weights], Weights]:
    def change(weights: Weights) -> Weights:
        weights["model.norm.weight"][3] = value
        return weights

    return change


def whole(weights: Weights) -> Weights:
    return {name: weight.to(torch.int8) for name, weight in weights.items()}


DAMAGE: dict[str, tuple[Callable[[Weights], Weights], dict[str, Any], str]] = {
    "one tensor is missing": (without("layers.1.mlp.up_proj.weight"), {}, "up_proj.weight is miss"),
    "a layer is missing": (lambda w: {n: x for n, x in w.items() if ".1." not in n}, {}, "missing"),
    "no tensor is left": (lambda _: {"x": torch.ones(1)}, {}, "are of another model"),
    "every name has a prefix": (
        lambda w: {f"foo.{n}": x for n, x in w.items()},
        {},
        "more are missing",
    ),
    "config has more layers": (dict, {"num_hidden_layers": 3}, r"layers\.2.* are missing"),
    "config has fewer layers": (dict, {"num_hidden_layers": 1}, r"layers\.1.* are not part"),
    "config has endless layers": (dict, {"num_hidden_layers": 10**7}, "are of another model"),
    "another width": (dict, {"hidden_size": 32}, r"lm_head.weight \[270, 16\] instead of"),
    "another vocabulary": (dict, {"vocab_size": 999}, "of another shape"),
    "NaN": (broken(float("nan")), {}, "model.norm.weight is NaN or infinite"),
    "infinity": (broken(float("-inf")), {}, "model.norm.weight is NaN or infinite"),
    "integers": (whole, {}, "stored as I8; weights must be floating"),
    "quantised": (dict, {"quantization_config": {"quant_method": "gptq"}}, r"\(gptq\)"),
    "no heads": (dict, {"num_attention_heads": 0}, "does not hold a model"),
    "a text as a width": (dict, {"hidden_size": "wide"}, "does not hold a model"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_refused_by_name(damage: str, good: Path, tmp_path: Path) -> None:
    change, fields, message = DAMAGE[damage]
    source, began = damaged(good, tmp_path, change, **fields), time.monotonic()
    builds: list[Callable[..., Any]] = [build_actor]
    if "lm_head" not in message and damage != "another vocabulary":
        builds.append(build_scorer)
    for build in builds:
        with pytest.raises(CheckpointError, match=f"^model.path=.*bad.*{message}"):
            build(source, TOKENIZER, seed=1)
    assert time.monotonic() - began < 10


def test_mapped_weights_are_checked_too(good: Path, tmp_path: Path) -> None:
    source = damaged(good, tmp_path, broken(float("nan")))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is NaN or infinite"):
        build_actor(source, TOKENIZER, seed=1, shard=lambda _: None)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models_are_loaded_by_policies_and_scorers(family: str, tmp_path: Path) -> None:
    model = save_base(tmp_path / "policy", family, TOKENIZER)
    policy = ModelSource(key="model.path", path=str(tmp_path / "policy"))
    again = build_actor(policy, TOKENIZER, seed=2)
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    scorer = build_scorer(policy, TOKENIZER, seed=2).pretrained
    scorer.save_pretrained(tmp_path / "scorer")
    saved = ModelSource(key="reward_model.path", path=str(tmp_path / "scorer"))
    assert torch.equal(
        build_scorer(saved, TOKENIZER, seed=3).pretrained.score.weight, scorer.score.weight
    )
    weights = load_file(tmp_path / "scorer" / WEIGHTS)
    save_file(without("score.weight")(weights), tmp_path / "scorer" / WEIGHTS, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"score.weight is missing"):
        build_scorer(saved, TOKENIZER, seed=3)


def test_an_adapter_that_is_its_own_base_is_refused(good: Path, tmp_path: Path) -> None:
    spec = LoraSpec(rank=2, alpha=4.0, dropout=0.0, target_modules=None, train_rest=False)
    actor = build_actor(source_of("llama"), TOKENIZER, seed=1, lora=spec)
    assert actor is not None
    fields = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path), "r": 2}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="adapters name one another as their base"):
        build_actor(ModelSource(key="model.path", path=str(tmp_path)), TOKENIZER, seed=1)


@pytest.mark.parametrize("places", [{}, {"a": "../other/model.safetensors"}, {"a": "/etc/passwd"}])
def test_an_index_stays_in_its_folder(places: dict[str, str], good: Path, tmp_path: Path) -> None:
    shutil.copy(good / "config.json", tmp_path)
    index = {"metadata": {}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="must map each tensor to a file of the same folder"):
        check_files(tmp_path, key="model.path")


def nested(depth: int) -> str:
    return '{"model": ' + "[" * depth + "]" * depth + "}"


@pytest.mark.parametrize(
    "tokenizer",
    [
        '{"model": {"type": "nothing"}}',
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}}',
        '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        '{"version": "1.0"}',
        nested(100_000),
    ],
)
def test_a_damaged_tokenizer_is_refused(tokenizer: str, good: Path, tmp_path: Path) -> None:
    shutil.copy(good / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    with pytest.raises(CheckpointError, match=r"^model\.path=.* does not hold a tokenizer"):
        load_tokenizer(tmp_path, key="model.path")


def test_a_limit_that_is_no_number_is_refused(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": "long"}))
    with pytest.raises(CheckpointError, match="model_max_length"):
        load_tokenizer(tmp_path, key="model.path")


def test_a_folder_of_the_run_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    source = ModelSource(key="model folder", path=str(tmp_path / "sft" / "model"))
    with pytest.raises(CheckpointError, match=r"sft/model is missing .*trains that phase again"):
        build_actor(source, TOKENIZER, seed=1)
