"""The end token that a configuration names, and tokens that two models share."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.model import ModelConfig
from rlhf.models.build import ModelSource, build_actor
from rlhf.models.tokenizers import (
    Tokens,
    check_same_tokens,
    load_or_train_tokenizer,
    load_tokenizer,
    train_byte_level_bpe,
    train_tokenizer,
)
from rlhf.options.lora.models import check_tokenizer
from rlhf.phases.shared.model_checks import require_same_tokens
from rlhf.runtime.worker import describe_new_embeddings
from tests.architectures import sizes
from tests.conftest import Compose

ARCHITECTURE = sizes("llama", 8, 8, layers=1, heads=1)


@pytest.fixture
def model(compose: Compose) -> ModelConfig:
    return to_run_config(compose(["model.vocab_size=300"])).model


def test_a_new_end_token_is_one_token_and_comes_back(model: ModelConfig, tmp_path: Path) -> None:
    train_tokenizer(["words"], vocab_size=262).save_pretrained(tmp_path / "first")
    model.tokenizer, model.end_token = str(tmp_path / "first"), "<|im_end|>"
    tokenizer = load_or_train_tokenizer(model, key="model", texts=())
    old = load_tokenizer(tmp_path / "first", key="k")
    assert len(tokenizer) == len(old) + 1
    assert tokenizer("words<|im_end|>").input_ids == [*old("words").input_ids, len(old)]
    tokenizer.save_pretrained(tmp_path / "second")
    again = load_tokenizer(tmp_path / "second", key="k")
    assert (again.eos_token, again.eos_token_id) == ("<|im_end|>", len(old))
    assert again.pad_token == old.pad_token
    source = ModelSource(key="model", path=None, architecture=ARCHITECTURE)
    build_actor(source, old, seed=1).save_pretrained(tmp_path / "first")
    grown = build_actor(ModelSource(key="model", path=str(tmp_path / "first")), tokenizer, seed=1)
    assert grown.get_input_embeddings().num_embeddings == len(tokenizer)
    assert grown.generation_config.eos_token_id == [len(old), old.eos_token_id]


def test_a_known_token_becomes_the_end_token(model: ModelConfig, tmp_path: Path) -> None:
    train_tokenizer(["words"], vocab_size=262).save_pretrained(tmp_path)
    model.tokenizer, model.end_token = str(tmp_path), "<|pad|>"
    tokenizer = load_or_train_tokenizer(model, key="model", texts=())
    assert len(tokenizer) == len(load_tokenizer(tmp_path, key="k"))
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|pad|>")


def test_a_trained_tokenizer_ends_as_it_is_told(model: ModelConfig) -> None:
    model.end_token = "<stop>"
    tokenizer = load_or_train_tokenizer(model, key="model", texts=["words"])
    assert tokenizer.eos_token == "<stop>"
    assert "<|end|>" not in tokenizer.get_vocab()
    model.end_token = None
    assert load_or_train_tokenizer(model, key="model", texts=["words"]).eos_token == "<|end|>"


def test_a_tokenizer_without_an_end_token_needs_one(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["words"], vocab_size=262)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"no end token.*model\.end_token=TEXT"):
        load_tokenizer(tmp_path, key="model.path")
    assert load_tokenizer(tmp_path, key="model.path", end_token="<stop>").eos_token == "<stop>"


def test_a_tokenizer_that_loses_a_sentence_is_refused(tmp_path: Path) -> None:
    train_tokenizer(["words"], vocab_size=262).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    parts = json.loads(file.read_text())
    kept = parts["added_tokens"]
    parts["model"] |= {"vocab": {each["content"]: each["id"] for each in kept}, "merges": []}
    file.write_text(json.dumps(parts))
    refusal = r"'A text\.' as '': .* Or set model\.tokenizer=FOLDER$"
    with pytest.raises(CheckpointError, match=refusal):
        load_tokenizer(tmp_path, key="model.path")


def changed(tokenizer: Tokenizer, change: Callable[[dict[str, Any]], None]) -> Tokenizer:
    stored = json.loads(tokenizer.to_str())
    change(stored)
    return Tokenizer.from_str(json.dumps(stored))


def add(name: str) -> Callable[[dict[str, Any]], None]:
    def change(stored: dict[str, Any]) -> None:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        new = {"id": len(stored["model"]["vocab"]), "content": name, "special": True, **flags}
        stored["added_tokens"].append(new)

    return change


def swap_two(stored: dict[str, Any]) -> None:
    vocabulary = stored["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


OTHERS = {  # a change of the reward model's tokenizer, or of its end token, and the refusal
    "the same": (lambda _: None, "<|end|>", None),
    "a padding token more": (add("[PAD]"), "<|end|>", None),
    "other ids": (
        swap_two,
        "<|end|>",
        r"[23] of the 2\d\d tokens of .* 'rewards\.NAME=\{kind: scorer, path: .+\}'",
    ),
    "another end": (
        lambda _: None,
        "<|pad|>",
        r"'<\|pad\|>', but model has '<\|end\|>'.* model\.end_token=.* reward_model\.tokenizer=",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("actor_has_more", [None, "[PAD]", "<|user|>"])
def test_a_reward_model_reads_all_that_the_actor_writes(
    name: str, actor_has_more: str | None, compose: Compose, tmp_path: Path
) -> None:
    """By the files alone, as plan=only reads them, and by the loaded tokenizers."""
    change, end, told = OTHERS[name]
    own = train_byte_level_bpe(["some words"], vocab_size=262)
    theirs, pad = changed(own, change), "<|pad|>"
    if actor_has_more is not None:
        own = changed(own, add(actor_has_more))
        pad = actor_has_more if actor_has_more == "[PAD]" else pad
        if actor_has_more == "<|user|>" and name != "other ids":
            told = r"1 of the 2\d\d tokens of model, such as '<\|user\|>'"
    words = ["model=pretrained", "model@reward_model=pretrained", "phase=ppo"]
    for key, tokenizer, ends in (
        ("model", own, {"eos_token": "<|end|>", "pad_token": pad}),
        ("reward_model", theirs, {"eos_token": end, "pad_token": "<|pad|>"}),
    ):
        made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)
        made.save_pretrained(tmp_path / key)
        (tmp_path / key / "config.json").write_text('{"vocab_size": 300}')
        words.append(f"{key}.path={tmp_path / key}")
    config = to_run_config(compose([*words, "data.template=plain"]))
    loaded = [
        Tokens.from_tokenizer(load_tokenizer(tmp_path / key, key="k"))
        for key in ("model", "reward_model")
    ]
    for check in (
        lambda: require_same_tokens(config, []),
        lambda: check_same_tokens(*loaded, place="there"),
    ):
        with nullcontext() if told is None else pytest.raises(ConfigError, match=told):
            check()
    if name == "another end" and actor_has_more is None:  # the way out that is printed
        require_same_tokens(replace(config, model=replace(config.model, end_token=end)), [])
        from_run = replace(config, from_run=str(tmp_path))  # whose tokenizer has its end token
        (tmp_path / "reward_model").rename(tmp_path / "tokenizer")
        (tmp_path / "reward_model").symlink_to("tokenizer")
        require_same_tokens(from_run, [])


def test_a_padding_token_may_be_absent_or_the_end_token() -> None:
    actor = Tokens({"a": 0, "<end>": 1, "<pad>": 2}, "<end>", "<pad>")
    theirs = {"a": 0, "<end>": 1, "x": 2}
    check_same_tokens(actor, Tokens(theirs, "<end>", None), place="there")
    moved = Tokens(theirs | {"<pad>": 3}, "<end>", "<pad>")
    with pytest.raises(ConfigError, match="such as '<pad>', have another id"):
        check_same_tokens(actor, moved, place="there")
    assert (actor.last_id, actor._replace(pad="<end>").last_id) == (1, 2)
    assert Tokens({"a": 0, "<end>": 1}, "<end>", "<end>").last_id == 1


def test_embeddings_that_are_added_are_said_and_no_adapter_has_them(
    compose: Compose, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 262}')
    words = ["phase=sft", "model=pretrained", f"model.path={tmp_path}", "data.template=plain"]
    tokenizer = train_tokenizer(["some words"], vocab_size=262)
    tokenizer.add_tokens(["<new>"])
    config = to_run_config(compose([*words, "lora=all", "lora.export=adapter"]))
    (line,) = describe_new_embeddings(config, 263)
    assert f"model.path={tmp_path} has 262 embeddings, and the tokenizer has 263 tokens: 1 " in line
    assert not list(describe_new_embeddings(config, 262))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": len(tokenizer) - 1}))
    with pytest.raises(ConfigError, match=r"lora\.export=adapter: .* use lora\.export=merged"):
        check_tokenizer(config, tokenizer)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": len(tokenizer)}))
    check_tokenizer(config, tokenizer)


def test_the_embeddings_must_have_what_the_actor_may_write(
    compose: Compose, tmp_path: Path
) -> None:
    words = ["model=pretrained", "model@reward_model=pretrained", "phase=ppo"]
    words += [f"{key}.path={tmp_path}" for key in ("model", "reward_model")]
    tokenizer = train_tokenizer(["some words"], vocab_size=262)
    tokenizer.save_pretrained(tmp_path)
    config = to_run_config(compose([*words, "data.template=plain"]))
    for rows, refuses in ((len(tokenizer), False), (len(tokenizer) - 1, True)):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": rows}))
        told = rf"reward_model\.path=.* {rows} embeddings.* id {rows};"
        with pytest.raises(ConfigError, match=told) if refuses else nullcontext():
            require_same_tokens(config, [])
