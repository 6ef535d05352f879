"""Public model folders, invented anew: they are used right, or refused by name.

The numbers are those of a list of 71 public cases.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.base.errors import CheckpointError
from rlhf.data.collate import collate_prompts
from rlhf.models.build import ModelSource, build_actor
from rlhf.models.tokenizers import load_tokenizer, train_tokenizer
from rlhf.rollout.hf import HfRollout
from rlhf.rollout.sampling import SamplingSettings, StopTexts, draw_tokens
from tests.models.test_damaged_folders import (
    TOKENIZER,
    WEIGHTS,
    Weights,
    build,
    change_json,
    change_weights,
)
from tests.models_on_disk import SMALL, save_base
from tests.plain_engine import PlainEngine

Make = Callable[[Path], Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("public") / "model"
    save_base(folder, "llama", TOKENIZER)
    return folder


def words_of(folder: Path) -> Any:
    return load_tokenizer(folder, key="model.path")


def change_config(**fields: Any) -> Make:
    return lambda folder: change_json(folder / "config.json", **fields)


def only(name: str, **fields: Any) -> Make:
    """Leave one file of JSON in a folder."""

    def make(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / name).write_text(json.dumps(fields))

    return make


def only_adapter(base: str) -> Make:
    fields = {"peft_type": "LORA", "base_model_name_or_path": base, "task_type": "CAUSAL_LM"}
    return only("adapter_config.json", r=4, target_modules=["q_proj"], **fields)


def make_gguf(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model.Q4_K_M.gguf")


def make_deepspeed_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder)
    (folder / "global_step10").mkdir(parents=True)
    (folder / "latest").write_text("global_step10")
    (folder / "global_step10" / "mp_rank_00_model_states.pt").write_bytes(b"PK")


def make_trainer_output(folder: Path) -> None:
    shutil.move(folder, folder.with_name("checkpoint-500"))
    folder.mkdir()
    shutil.move(folder.with_name("checkpoint-500"), folder)
    (folder / "training_args.bin").write_bytes(b"PK")


def lfs_pointer(name: str) -> Make:
    """Return a change of a folder that git has cloned without Git LFS."""
    mark = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    return lambda folder: (folder / name).write_text(mark) and None


# Row of the list, the folder, what is loaded from it, and parts of the refusal.
REFUSED: list[tuple[float, Make, Make, list[str]]] = [
    *(
        (42, only("config.json", model_type=kind), words_of, ["hold a tokenizer", "l.tokenizer="])
        for kind in ("qwen2", "gpt2", "opt", "gpt_neox", "llama")
    ),
    (44, only_adapter("nobody/has-this"), build, ["base_model_name_or_path=nobody/has-this"]),
    (44.1, only_adapter(r"C:\models\base"), build, [r"base_model_name_or_path=C:\models\base"]),
    (44.2, only_adapter("."), words_of, ["does not hold a tokenizer", "model.tokenizer=FOLDER"]),
    *(
        (54, change_config(quantization_config={"quant_method": kind}), build, [kind, "unquant"])
        for kind in ("gptq", "awq", "bitsandbytes", "fp8")
    ),
    (54.1, make_gguf, build, ["does not hold a model", "safetensors"]),
    (54.2, make_deepspeed_checkpoint, build, ["does not hold a model"]),
    (54.3, make_trainer_output, build, ["does not hold a model"]),
    (47, lfs_pointer(WEIGHTS), build, [f"({WEIGHTS} is a Git LFS", "`git lfs pull`"]),
    (47.1, lfs_pointer("tokenizer.json"), words_of, ["(tokenizer.json is a Git", "`git lfs pull`"]),
    (47.2, lfs_pointer("config.json"), build, ["(config.json is a Git LFS", "`git lfs pull`"]),
]


@pytest.mark.parametrize(("case", "make", "load", "parts"), REFUSED)
def test_folders_are_refused_by_name(
    case: float, make: Make, load: Make, parts: list[str], saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    make(folder)
    with pytest.raises(CheckpointError) as refused:
        load(folder)
    told = ["model.path", str(folder), *parts]
    assert [part for part in told if part not in str(refused.value)] == [], refused.value


def tie_with_copy(folder: Path) -> None:
    def copy(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    change_weights(folder, copy)
    change_json(folder / "config.json", tie_word_embeddings=True)


def save_halves(folder: Path) -> None:
    def halve(weights: Weights) -> None:
        weights |= {name: each.bfloat16() for name, each in weights.items()}

    change_weights(folder, halve)


def save_shards(folder: Path) -> None:
    model = build(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1


USED: list[tuple[float, Make]] = [
    (53, lambda folder: (folder / "pytorch_model.bin").write_bytes(b"PK")),
    (53.1, save_shards),
    (53.2, save_halves),
    (55, tie_with_copy),
    (55.1, change_config(architectures=["LlamaForSequenceClassification"])),
    (55.2, change_config(pad_token_id=-1)),
    (55.3, change_config(use_cache=False)),
    (55.4, change_config(_attn_implementation="flash_attention_2", torch_dtype="float16")),
]


@pytest.mark.parametrize(("case", "make"), USED)
def test_folders_are_used(case: float, make: Make, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    expected = build(folder).model.layers[0].mlp.up_proj.weight.detach().clone()
    make(folder)
    model = build(folder)
    found = model.model.layers[0].mlp.up_proj.weight
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
    assert model(torch.tensor([[2, 3]])).logits.isfinite().all()


@pytest.mark.parametrize(("more", "embeddings"), [(30, 300), (-10, 270)])
def test_embeddings_hold_all_tokens(more: int, embeddings: int, tmp_path: Path) -> None:
    size = {"intermediate_size": 16, "vocab_size": len(TOKENIZER) + more}
    source = ModelSource(
        key="model", path=None, architecture={"model_type": "llama", **SMALL, **size}
    )
    model = build_actor(source, TOKENIZER, seed=1)  # 51
    assert model.get_input_embeddings().num_embeddings == embeddings, len(TOKENIZER)


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["words"], vocab_size=262)  # 52
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    found = words_of(tmp_path)
    assert found.pad_token == found.eos_token == "<|end|>"


WINDOW = {"sliding_window": 4, "intermediate_size": 16, "num_key_value_heads": 1, "head_dim": 8}
CAPPED = WINDOW | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
EXPERTS = WINDOW | {"num_local_experts": 2, "num_experts_per_tok": 1}
PENALTIES = {"repetition_penalty": 1.5, "max_length": 5, "top_p": 0.1, "do_sample": True}
PENALTIES |= {"no_repeat_ngram_size": 1}
SAMPLED: list[tuple[float, str, dict[str, Any], dict[str, Any]]] = [
    (46, "gemma2", CAPPED, {}),
    (46.1, "gemma3_text", WINDOW, {}),
    (46.2, "mistral", WINDOW, {}),
    (46.3, "gpt_oss", EXPERTS, {}),
    (49, "gpt2", {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5}, {}),
    (50, "mistral", WINDOW, PENALTIES),
]


@torch.no_grad()
@pytest.mark.parametrize(("case", "model_type", "fields", "generation"), SAMPLED)
def test_generate_draws_from_the_policy_that_is_trained(
    case: float, model_type: str, fields: dict[str, Any], generation: dict[str, Any]
) -> None:
    architecture = {"model_type": model_type, **SMALL, **fields}
    source = ModelSource(key="model", path=None, architecture=architecture)
    model = build_actor(source, TOKENIZER, seed=1).train()
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    prompt_ids, tokens = [[5, 6, 7, 8, 9, 10], [11, 12]], 8
    draws = torch.rand(2, tokens, generator=torch.Generator().manual_seed(0))
    cpu = torch.device("cpu")
    prompts = collate_prompts(prompt_ids, ["", ""], draws, pad_id=0, device=cpu)
    sampling = SamplingSettings(max_tokens=tokens, temperature=1.0, top_k=0, top_p=1.0)
    backend = HfRollout(sampling, pad_id=0, stop=StopTexts(TOKENIZER, ()))
    responses = backend.generate(PlainEngine(model), prompts)
    assert responses.keep_BT.sum() > tokens
    model.eval()
    for row, ids in enumerate(prompt_ids):
        seen = list(ids)
        for step in range(int(responses.keep_BT[row].sum())):
            logits = model(torch.tensor([seen])).logits[:, -1]
            (drawn,) = draw_tokens(logits, draws[row, step][None], sampling).tokens_B.tolist()
            assert responses.ids_BT[row, step] == drawn
            seen.append(drawn)
