"""Models whose weights are taken away as soon as they are there have the weights of whole ones."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rlhf.models.build import build_actor, build_scorer
from rlhf.models.pretrained import draw_weights_by_block
from rlhf.models.sources import ModelSource
from rlhf.models.weight_files import stored_dtype
from tests.models_on_disk import FAMILIES, save_base, small_tokenizer, source_of, whole_state


class Taken:
    """Takes parameters away; knows what they were, and how many numbers came at once."""

    def __init__(self) -> None:
        self.values: dict[nn.Parameter, Tensor] = {}

    def __call__(self, parameter: nn.Parameter) -> None:
        if parameter not in self.values:
            self.values[parameter] = parameter.detach().clone()
            parameter.data = torch.empty(0)

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: self.values[p].float() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_stored", [False, True])
def test_weights_are_those_of_a_whole_model(
    family: str, tmp_path: Path, *, is_stored: bool
) -> None:
    tokenizer, source, taken = small_tokenizer(), source_of(family), Taken()
    if is_stored:
        save_base(tmp_path, family, tokenizer)
        source = ModelSource(key="k", path=str(tmp_path))
    whole = build_scorer(source, tokenizer, seed=3).pretrained
    pieces = build_scorer(source, tokenizer, seed=3, shard=taken).pretrained
    assert not any(p.numel() for p in pieces.parameters())
    expected = {name: p.detach() for name, p in whole.named_parameters()}
    torch.testing.assert_close(taken.state(pieces), expected, rtol=0, atol=0)
    buffers = [dict(model.named_buffers()) for model in (pieces, whole)]
    torch.testing.assert_close(*buffers, rtol=0, atol=0)


def test_random_blocks_are_sharded_one_after_another() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    modules: list[nn.Module] = []
    held, taken = [], Taken()

    def shard(parameter: nn.Parameter) -> None:
        whole = {p for m in modules for p in m.parameters() if p.device.type == "cpu"}
        held.append(sum(p.numel() for p in whole))
        taken(parameter)

    note = nn.modules.module.register_module_module_registration_hook(
        lambda _, __, module: modules.append(module)
    )
    with note, draw_weights_by_block(shard):
        model = AutoModelForCausalLM.from_config(config)
    block = sum(taken.values[p].numel() for p in model.model.layers[0].parameters())
    assert max(held) == block, "beside the block that is being sharded nothing is whole"


def test_transformers_is_left_as_it_was() -> None:
    before = whole_state(build_actor(source_of("opt"), small_tokenizer(), seed=3))
    with pytest.raises(ZeroDivisionError), draw_weights_by_block(Taken()):
        raise ZeroDivisionError
    after = whole_state(build_actor(source_of("opt"), small_tokenizer(), seed=3))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_missing_head_is_drawn_in_fp32(tmp_path: Path) -> None:
    tokenizer, taken = small_tokenizer(), Taken()
    save_base(tmp_path, "opt", tokenizer).bfloat16().save_pretrained(tmp_path)
    source = ModelSource(key="k", path=str(tmp_path))
    expected = build_scorer(source, tokenizer, seed=3).pretrained.score.weight
    pieces = build_scorer(source, tokenizer, seed=3, shard=taken).pretrained
    head = taken.values[pieces.score.weight]
    assert torch.equal(head, expected)
    assert not torch.equal(head, head.bfloat16().float())


def test_stored_dtype_is_that_of_the_files_and_fp32_of_mixed_ones(tmp_path: Path) -> None:
    model = save_base(tmp_path / "one", "opt", small_tokenizer())
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype).save_pretrained(tmp_path / "one")
        model.save_pretrained(tmp_path / "many", max_shard_size="10KB")
        assert not (tmp_path / "many" / "model.safetensors").exists()
        for name in ("one", "many"):
            assert stored_dtype(ModelSource(key="k", path=str(tmp_path / name))) is dtype
    model.model.decoder.final_layer_norm = nn.LayerNorm(8)
    model.save_pretrained(tmp_path / "mixed")
    assert stored_dtype(ModelSource(key="k", path=str(tmp_path / "mixed"))) is torch.float32


def test_weights_stay_in_the_file_until_they_are_sharded(tmp_path: Path) -> None:
    save_base(tmp_path, "llama", small_tokenizer()).bfloat16().save_pretrained(tmp_path)
    file = str(tmp_path / "model.safetensors")  # tests before this one may have mapped others
    num_mapped = 0

    def shard(parameter: nn.Parameter) -> None:
        nonlocal num_mapped
        maps = Path("/proc/self/maps").read_text().splitlines()
        ranges = (line.split()[0].split("-") for line in maps if line.endswith(file))
        num_mapped += any(
            int(first, 16) <= parameter.data_ptr() < int(last, 16) for first, last in ranges
        )

    source = ModelSource(key="k", path=str(tmp_path))
    model = build_actor(source, small_tokenizer(), seed=3, shard=shard)
    assert num_mapped == len(list(model.parameters()))
