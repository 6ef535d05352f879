"""A folder that does not hold the model or tokenizer that it describes is refused by name."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.models.build import build_actor, build_scorer
from rlhf.models.pretrained import require_one_label_model
from rlhf.models.sources import RUN_FOLDER, ModelSource
from rlhf.models.tokenizers import load_tokenizer
from rlhf.options.lora.models import save_adapter
from tests.architectures import sizes
from tests.lora_settings import adding, lora_config
from tests.models_on_disk import FAMILIES, save_base, small_tokenizer, source_of, whole_state

TOKENIZER = small_tokenizer()
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Weights = dict[str, Tensor]
Damage = Callable[[Path], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small llama, whose output layer is not tied."""
    save_base(tmp_path / "model", "llama", TOKENIZER)
    return tmp_path / "model"


def change_weights(folder: Path, change: Callable[[Weights], Any], name: str = WEIGHTS) -> None:
    weights = load_file(folder / name)
    change(weights)
    save_file(weights, folder / name, metadata={"format": "pt"})


def change_json(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def build(folder: Path, **how: Any) -> Any:
    return build_actor(ModelSource(key="model.path", path=str(folder)), TOKENIZER, seed=1, **how)


def without(ending: str) -> Callable[[Weights], None]:
    return lambda weights: [weights.pop(n) for n in list(weights) if ending in n] and None


def renamed(weights: Weights) -> None:
    for name in list(weights):
        weights[f"foo.{name}"] = weights.pop(name)


def not_finite(value: float) -> Callable[[Weights], None]:
    return lambda weights: weights["model.norm.weight"].fill_(value)


def of_type(dtype: torch.dtype) -> Callable[[Weights], None]:
    name = "model.layers.0.mlp.up_proj.weight"
    return lambda weights: weights.update({name: weights[name].to(dtype)})


def weights(change: Callable[[Weights], Any]) -> Damage:
    return lambda folder: change_weights(folder, change)


def content(change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def fields(**changed: Any) -> Damage:
    return lambda folder: change_json(folder / "config.json", **changed)


def index(listed: Any) -> Damage:
    """Divide the weights into files, and list others."""

    def damage(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        model = build_actor(source_of("llama"), TOKENIZER, seed=1)
        model.save_pretrained(folder, max_shard_size="10KB")
        (folder / INDEX).write_text(json.dumps(listed))

    return damage


def file_map(**files: Any) -> Damage:
    return index({"metadata": {}, "weight_map": files})


NOT_HELD = "does not hold a model"
SHARD = "shard-00001-model-00001-of-00001.safetensors"  # of a distributed checkpoint
FOLDER_DAMAGE: dict[str, tuple[Damage, str]] = {
    "a tensor is missing": (weights(without("norm.weight")), "missing.*norm.weight"),
    "a layer is missing": (weights(without("layers.1.")), r"missing.*layers\.1\..*more"),
    "the output layer is missing": (weights(without("lm_head")), "missing.*lm_head.weight"),
    "other names": (weights(renamed), r"missing.*not in the model.*foo\."),
    "an additional tensor": (
        weights(lambda w: w.update(v_head=torch.zeros(2))),
        "not in the model.*v_head",
    ),
    "another shape": (
        weights(lambda w: w.update({"model.norm.weight": torch.ones(17)})),
        r"model\.norm\.weight.*\(17\).*\(16\)",
    ),
    "NaN": (weights(not_finite(float("nan"))), "model.norm.weight.*NaN"),
    "infinite": (weights(not_finite(float("inf"))), "model.norm.weight.*infinite"),
    "whole numbers": (weights(of_type(torch.int8)), "up_proj.weight.*I8"),
    "booleans": (weights(of_type(torch.bool)), "up_proj.weight.*BOOL"),
    "text": (content(lambda _: b"hello"), "does not hold.*header too small"),
    "empty": (content(lambda _: b""), "does not hold.*header too small"),
    "cut off": (content(lambda whole: whole[:-8]), "does not hold.*file not fully covered"),
    "a huge header": (
        content(lambda _: struct.pack("<Q", 2**60)),
        "does not hold.*header too large",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), NOT_HELD),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), NOT_HELD),
    "an unknown type": (fields(model_type="x"), "model type `x`"),
    "an image model": (fields(model_type="vit"), "ViTConfig"),
    "a negative width": (fields(hidden_size=-8), "negative dimension -8"),
    "more layers": (fields(num_hidden_layers=3), r"missing.*layers\.2\."),
    "far more layers": (fields(num_hidden_layers=10**7), "num_hidden_layers=10000000"),
    "beyond memory": (fields(num_hidden_layers=10**15), "num_hidden_layers=1000000000000000"),
    "many labels": (fields(num_labels=10**9), "num_labels=1000000000"),
    "a vast vocabulary": (fields(vocab_size=10**11), "embed_tokens.weight"),
    "another vocabulary": (fields(vocab_size=269), "embed_tokens.weight.*269"),
    "another width": (fields(hidden_size=24), "embed_tokens.weight"),
    "other key-value heads": (fields(num_key_value_heads=1, head_dim=8), "k_proj.weight"),
    "heads in words": (fields(num_attention_heads="two"), NOT_HELD),
    "weights elsewhere": (fields(transformers_weights="../x.safetensors"), "transformers_weights"),
    "an empty map": (file_map(), "weight_map"),
    "no map": (index({"metadata": {}}), "weight_map"),
    "no metadata": (index({"weight_map": {"a": WEIGHTS}}), "metadata"),
    "a list": (index([]), "weight_map"),
    "numbers for files": (file_map(a=5), "weight_map"),
    "a missing file": (file_map(a="b"), "a file named b"),
    "another folder": (file_map(a="../x.safetensors"), r"\.\./x"),
    "a file of the system": (file_map(a="/etc/passwd"), "/etc/passwd"),
    "a shard": (lambda folder: (folder / SHARD).write_bytes(b""), "shard-00001-model"),
}


@pytest.mark.parametrize("name", FOLDER_DAMAGE)
def test_a_damaged_folder_is_refused_by_name(name: str, folder: Path) -> None:
    damage, words = FOLDER_DAMAGE[name]
    damage(folder)
    with pytest.raises(CheckpointError, match=rf"model\.path={folder}.*{words}"):
        build(folder)


@pytest.mark.parametrize("name", ["a tensor is missing", "NaN", "whole numbers"])
def test_damaged_weights_are_refused_while_they_are_sharded(name: str, folder: Path) -> None:
    damage, words = FOLDER_DAMAGE[name]
    damage(folder)
    with pytest.raises(CheckpointError, match=words):
        build(folder, shard=lambda parameter: parameter.detach())


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "sliding_window|NoneType"),
        ("gemma", {"use_bidirectional_attention": True}, "depend on later tokens"),
        ("llama", {"rms_norm_eps": -10.0}, "or are NaN"),
        ("starcoder2", {"num_key_value_heads": 3, "num_attention_heads": 4}, "size|shape"),
        ("llama", {"num_hidden_layers": 2**40}, "must be 1000 or less"),
    ],
)
def test_a_config_with_which_no_model_runs_is_refused(
    family: str, fields: dict[str, Any], reason: str
) -> None:
    """The weights would fit."""
    architecture = sizes(family, 16, 16, num_key_value_heads=1, head_dim=8) | fields
    source = ModelSource(key="model", path=None, architecture=architecture)
    with pytest.raises(ConfigError, match=f"model: .*({reason})"):
        build_actor(source, TOKENIZER, seed=1)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "[]", '"llama"', "", "{}"])
def test_a_config_that_is_no_config_is_refused(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.path"):
        build(folder)
    with pytest.raises(CheckpointError, match=r"reward_model\.path"):
        require_one_label_model(reward_source(folder))


def reward_source(folder: Path) -> ModelSource:
    return ModelSource(key="reward_model.path", path=str(folder))


def test_a_reward_model_without_its_head_is_refused(tmp_path: Path) -> None:
    scorer = build_scorer(source_of("llama"), TOKENIZER, seed=1).pretrained
    scorer.save_pretrained(tmp_path)
    source = reward_source(tmp_path)
    build_scorer(source, TOKENIZER, seed=2)
    change_weights(tmp_path, without("score"))
    with pytest.raises(CheckpointError, match=r"reward_model\.path.*missing.*score\.weight"):
        build_scorer(source, TOKENIZER, seed=2)


@pytest.mark.parametrize("architectures", [5, [5], "a", None])
def test_a_reward_model_of_another_class_is_refused(architectures: Any, folder: Path) -> None:
    change_json(folder / "config.json", architectures=architectures, num_labels=1)
    with pytest.raises(CheckpointError, match=r"reward_model\.path"):
        require_one_label_model(reward_source(folder))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_reward_model_does_not_answer(family: str, tmp_path: Path) -> None:
    build_scorer(source_of(family), TOKENIZER, seed=1).pretrained.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        build(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models_are_loaded_by_policies_and_scorers(family: str, tmp_path: Path) -> None:
    model = save_base(tmp_path / "policy", family, TOKENIZER)
    again = build(tmp_path / "policy")
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    scorer = build_scorer(reward_source(tmp_path / "policy"), TOKENIZER, seed=2).pretrained
    with pytest.raises(CheckpointError, match="not a trained reward model"):
        require_one_label_model(reward_source(tmp_path / "policy"))
    scorer.save_pretrained(tmp_path / "scorer")
    require_one_label_model(reward_source(tmp_path / "scorer"))
    saved = build_scorer(reward_source(tmp_path / "scorer"), TOKENIZER, seed=3).pretrained
    assert torch.equal(saved.score.weight, scorer.score.weight)
    for each in (scorer, saved):
        trunks = zip(each.base_model.parameters(), model.base_model.parameters(), strict=True)
        assert all(torch.equal(weights, expected) for weights, expected in trunks)


def save_adapters(folder: Path, base: Path) -> None:
    """Save an adapter of rank 2 on the model in ``base``."""
    model = build(base, extensions=adding(lora_config()))
    folder.mkdir()
    save_adapter(folder, model, whole_state(model).items(), base=str(base))


ADAPTER_DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "a vast rank": ({"r": 10**9}, "r=1000000000, its weights have rank 2"),
    "a rank in words": ({"r": "two"}, "r='two'"),
    "no rank": ({"r": 0}, "does not fit its base"),
    "a number for a base": ({"base_model_name_or_path": 5}, "names a base model"),
    "no base": ({"base_model_name_or_path": None}, "names a base model"),
    "another kind": ({"peft_type": "x"}, "does not hold a model"),
    "a kind in a list": ({"peft_type": [1]}, "does not hold a model"),
}


@pytest.mark.parametrize("damage", ADAPTER_DAMAGE)
def test_a_damaged_adapter_is_refused(damage: str, folder: Path, tmp_path: Path) -> None:
    fields, words = ADAPTER_DAMAGE[damage]
    save_adapters(tmp_path / "adapter", folder)
    build(tmp_path / "adapter")
    change_json(tmp_path / "adapter" / "adapter_config.json", **fields)
    with pytest.raises(CheckpointError, match=rf"model\.path=.*{words}"):
        build(tmp_path / "adapter")
    other_kind = '{"peft_type": "IA3", "base_model_name_or_path": "a"}'
    for content, words in (("{", "not hold a model"), (other_kind, "must be a LoRA adapter")):
        (tmp_path / "adapter" / "adapter_config.json").write_text(content)
        with pytest.raises(CheckpointError, match=rf"model\.path=.*{words}"):
            build(tmp_path / "adapter")


def test_an_adapter_with_nan_is_refused(folder: Path, tmp_path: Path) -> None:
    save_adapters(tmp_path / "adapter", folder)
    nan = lambda weights: next(iter(weights.values())).fill_(float("nan"))  # noqa: E731
    change_weights(tmp_path / "adapter", nan, "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.path=.*adapter: model\.layers.*NaN"):
        build(tmp_path / "adapter")


@pytest.mark.parametrize("bases", [["a"], ["b", "a"]])
def test_adapters_in_a_circle_are_refused(bases: list[str], folder: Path, tmp_path: Path) -> None:
    for name, base in zip("ab", bases, strict=False):
        save_adapters(tmp_path / name, folder)
        file = tmp_path / name / "adapter_config.json"
        change_json(file, base_model_name_or_path=str(tmp_path / base))
    with pytest.raises(CheckpointError, match="is an adapter on itself"):
        build(tmp_path / "a")


OLD_BUFFERS = {
    "llama": ["model.layers.0.self_attn.rotary_emb.inv_freq"],
    "gpt2": ["h.0.attn.bias", "transformer.h.1.attn.masked_bias"],
    "gpt_neox": [f"gpt_neox.layers.0.attention.{n}" for n in ("bias", "masked_bias")],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_old_files_with_their_constants_are_whole(family: str, tmp_path: Path) -> None:
    save_base(tmp_path, family, TOKENIZER)
    constants = {n: torch.ones(1, 1, 4, 4, dtype=torch.bool) for n in OLD_BUFFERS.get(family, [])}
    change_weights(tmp_path, lambda weights: weights.update(constants))
    build(tmp_path)
    build_scorer(reward_source(tmp_path), TOKENIZER, seed=1)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_names_without_the_prefix_of_the_trunk_are_known(family: str, tmp_path: Path) -> None:
    saved = save_base(tmp_path, family, TOKENIZER)
    saved.base_model.save_pretrained(tmp_path)
    build_scorer(reward_source(tmp_path), TOKENIZER, seed=1)


def test_a_new_output_name_of_pythia_is_known(tmp_path: Path) -> None:
    def rename(weights: Weights) -> None:
        if "lm_head.weight" in weights:
            weights["embed_out.weight"] = weights.pop("lm_head.weight")

    save_base(tmp_path, "gpt_neox", TOKENIZER)
    change_weights(tmp_path, rename)
    build(tmp_path)
    build_scorer(reward_source(tmp_path), TOKENIZER, seed=1)


def test_ids_beyond_the_embeddings_are_refused(folder: Path, tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "words")
    file = tmp_path / "words" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["some"] = 900
    content["model"]["vocab"].pop("!")
    file.write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path / "words", key="model.tokenizer")
    with pytest.raises(CheckpointError, match="900"):
        build_actor(ModelSource(key="model.path", path=str(folder)), tokenizer, seed=1)


def change_model(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content["model"].update(fields)


TOKENIZER_DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "unknown model": change_model(type="x"),
    "unknown pre-tokenizer": lambda content: content.update(pre_tokenizer={"type": "x"}),
    "a bad expression": lambda content: content.update(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}}
        | {"behavior": "Isolated", "invert": False}
    ),
    "merges of unknown tokens": change_model(merges=[["ab", "cdef"]]),
    "negative ids": lambda content: content["model"]["vocab"].update(a=-1),
    "no model": lambda content: content.pop("model"),
    "a vocabulary of lists": change_model(vocab=[1, 2]),
    "a prefix, with which it panics": change_model(continuing_subword_prefix="text"),
}


@pytest.mark.parametrize("damage", TOKENIZER_DAMAGE)
def test_a_tokenizer_of_another_structure_is_refused(damage: str, tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    TOKENIZER_DAMAGE[damage](content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"model\.tokenizer=.*does not hold a tokenizer"):
        load_tokenizer(tmp_path, key="model.tokenizer")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, "{", "[]"])
def test_other_json_is_refused(name: str, content: str, tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match="does not hold a tokenizer"):
        load_tokenizer(tmp_path, key="model.tokenizer")


def load_scorer(folder: Path, key: str) -> Any:
    return build_scorer(ModelSource(key=key, path=str(folder)), TOKENIZER, seed=1)


@pytest.mark.parametrize(
    ("place", "load", "remove"),
    [
        ("reward/model", load_scorer, "reward/result.json"),
        ("tokenizer", load_tokenizer, "tokenizer"),
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_the_way_out_of_a_damaged_run_is_to_make_the_folder_again(
    place: str, load: Callable[..., Any], remove: str, tmp_path: Path, *, is_there: bool
) -> None:
    folder = tmp_path / "run" / place
    if is_there:
        folder.mkdir(parents=True)
    with pytest.raises(CheckpointError) as caught:
        load(folder, key=RUN_FOLDER)
    text = str(caught.value)
    assert f"{folder} {'does not hold' if is_there else 'is missing'}" in text
    assert f"remove {tmp_path}/run/{remove} if it is there" in text
    assert f"python launch.py resume={tmp_path}/run" in text
    assert "from the hub" not in text
    assert "model.init" not in text


def test_a_failed_allocation_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("too little memory")

    monkeypatch.setattr(nn.Module, "register_parameter", fail)
    with pytest.raises(torch.OutOfMemoryError):
        build(folder)
