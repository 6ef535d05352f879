"""The end token that a configuration names."""

import json
from pathlib import Path

import pytest

from rlhf.base.errors import CheckpointError
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.model import ModelConfig
from rlhf.models.build import ModelSource, build_actor
from rlhf.models.tokenizers import load_or_train_tokenizer, load_tokenizer, train_tokenizer
from tests.conftest import Compose

SHAPE = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
ARCHITECTURE = {"model_type": "llama", "num_attention_heads": 1, **SHAPE}


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
