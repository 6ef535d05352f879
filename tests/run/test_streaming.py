"""Weights that come one at a time make the folder that transformers would have written."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhf.models.build import build_actor
from rlhf.models.sources import ModelSource
from rlhf.run.model_folder import save_from_stream, tensors_to_save
from tests.models_on_disk import FAMILIES, small_tokenizer, source_of


@pytest.mark.parametrize(
    ("family", "shard_bytes"), [*((family, 3000) for family in FAMILIES), ("opt", 10**9)]
)
def test_a_folder_is_that_of_transformers(family: str, shard_bytes: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = build_actor(source_of(family), small_tokenizer(), seed=1).bfloat16()
    model.save_pretrained(tmp_path / "expected")
    (tmp_path / "streamed").mkdir()
    stream = iter(tensors_to_save(model).items())
    save_from_stream(tmp_path / "streamed", model, stream, shard_bytes=shard_bytes)
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    files = sorted((tmp_path / "streamed").glob("*.safetensors"))
    assert {n: t for f in files for n, t in load_file(f).items()}.keys() == expected.keys()
    for name in ("config.json", "generation_config.json"):
        texts = [(tmp_path / place / name).read_text() for place in ("expected", "streamed")]
        assert texts[0] == texts[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "streamed", dtype=torch.bfloat16)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert (len(files) == 1) == (shard_bytes == 10**9)
    assert not list((tmp_path / "streamed").glob("*.part"))


@pytest.mark.parametrize("shard_bytes", [3000, 10**9])
def test_experts_have_their_own_names(shard_bytes: int, tmp_path: Path) -> None:
    """The model holds all experts of a layer in one tensor, the file each in its own."""
    fields = {"model_type": "mixtral", "hidden_size": 16, "intermediate_size": 16}
    fields |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    fields |= {"num_local_experts": 3}
    source = ModelSource(key="model", path=None, architecture=fields)
    model = build_actor(source, small_tokenizer(), seed=1)
    model.save_pretrained(tmp_path / "expected")
    stream = iter(tensors_to_save(model).items())
    save_from_stream(tmp_path, model, stream, shard_bytes=shard_bytes)
    saved = {n: t for f in tmp_path.glob("*.safetensors") for n, t in load_file(f).items()}
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    assert any(".experts.2." in name for name in saved)
    assert saved.keys() == expected.keys()
    assert all(saved[name].equal(tensor) for name, tensor in expected.items())


def test_files_keep_to_their_size_and_are_written_as_soon_as_they_are_full(tmp_path: Path) -> None:
    model = build_actor(source_of("opt"), small_tokenizer(), seed=1)
    sizes = {"a": 100, "b": 100, "c": 250, "d": 1, "e": 199}  # numbers, of 4 bytes
    written = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, size in sizes.items():
            written.append(len(list(tmp_path.glob("*.part"))))
            yield name, torch.full((size,), 1.5)

    save_from_stream(tmp_path, model, stream(), shard_bytes=800)
    assert written == [0, 0, 0, 1, 2]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second, third = (f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3))
    files = {"a": first, "b": first, "c": second, "d": third, "e": third}
    assert index["weight_map"] == files
    assert index["metadata"] == {"total_size": 4 * 650, "total_parameters": 650}
    for name, file in files.items():
        assert load_file(tmp_path / file)[name].shape == (sizes[name],)


def test_what_is_streamed_may_be_overwritten_after_it_was_taken(tmp_path: Path) -> None:
    model = build_actor(source_of("opt"), small_tokenizer(), seed=1)

    def stream() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(4)
        for value, name in enumerate("abc"):
            yield name, buffer.fill_(value)

    save_from_stream(tmp_path, model, stream(), shard_bytes=10**6)
    saved = load_file(tmp_path / "model.safetensors")
    assert {name: tensor[0].item() for name, tensor in saved.items()} == {"a": 0, "b": 1, "c": 2}
