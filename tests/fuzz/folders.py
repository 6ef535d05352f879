"""Damaged folders of models and tokenizers."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlhf.data.encoding import Encoder
from rlhf.models.build import build_actor, build_scorer
from rlhf.models.pretrained import require_one_label_model
from rlhf.models.sources import ModelSource
from rlhf.models.tokenizers import load_tokenizer
from rlhf.options.lora.models import save_adapter
from tests.fuzz.case import Case
from tests.fuzz.mutations import mutate
from tests.lora_settings import adding, lora_config
from tests.models_on_disk import save_base, small_tokenizer, whole_state

FAMILIES = ("opt", "llama", "gpt2", "qwen3", "gpt_neox")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@cache
def good_folder(family: str, *, is_scorer: bool) -> Path:
    """A folder with an intact model and its tokenizer, made once."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf-fuzz-"))
    save_base(folder / "policy", family, small_tokenizer())
    if not is_scorer:
        return folder / "policy"
    source = ModelSource(key="model.path", path=str(folder / "policy"))
    build_scorer(source, small_tokenizer(), seed=1).pretrained.save_pretrained(folder / "scorer")
    return folder / "scorer"


@cache
def good_adapter(family: str) -> Path:
    """A folder with an intact adapter on an intact model, made once."""
    base = good_folder(family, is_scorer=False)
    source = ModelSource(key="model.path", path=str(base))
    spec = lora_config()
    model = build_actor(source, small_tokenizer(), seed=1, extensions=adding(spec))
    folder = base.parent / "adapter"
    folder.mkdir()
    save_adapter(folder, model, whole_state(model).items(), base=str(base))
    return folder


@cache
def good_shards(family: str) -> Path:
    """A folder with an intact model in several files, made once."""
    folder = good_folder(family, is_scorer=False).parent / "shards"
    source = ModelSource(key="model.path", path=str(folder.parent / "policy"))
    model = build_actor(source, small_tokenizer(), seed=1)
    model.save_pretrained(folder, max_shard_size="4KB")
    return folder


def mutate_tensors(draw: Random, path: Path) -> tuple[str, bool]:
    """Damage the tensors of a file; return what was done, and if it must be refused."""
    weights = load_file(path)
    name = draw.choice(sorted(weights))
    tensor = weights[name]
    way = draw.choice(["lost", "renamed", "shape", "type", "broken", "added", "prefix", "layer"])
    match way:
        case "lost":
            del weights[name]
        case "renamed":
            weights[f"{name}x"] = weights.pop(name)
        case "shape":
            weights[name] = torch.cat([tensor, tensor])
        case "type":
            weights[name] = tensor.to(draw.choice([torch.int8, torch.bool, torch.int64]))
        case "broken":
            tensor.view(-1)[draw.randrange(tensor.numel())] = draw.choice([1, -1]) * draw.choice(
                [float("nan"), float("inf")]
            )
        case "added":
            weights[f"model.{draw.choice(['layers.9.x', 'y'])}.weight"] = torch.ones(3)
        case "prefix":
            weights = {f"foo.{each}": value for each, value in weights.items()}
        case "layer":
            weights = {each: value for each, value in weights.items() if ".1." not in each}
    save_file({n: w.contiguous() for n, w in weights.items()}, path, metadata={"format": "pt"})
    # Heads may be tied, and a bias of integers is no quantised weight.
    is_certain = "head" not in name and "embed" not in name and "wte" not in name
    return f"{way} {name}", is_certain and (way != "type" or name.endswith(".weight"))


def model_cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield damaged model folders, loaded as policies, scorers, reward models and sharded."""
    while True:
        kind, family = draw.choice(["policy", "scorer", "adapter", "shards"]), draw.choice(FAMILIES)
        place = folder / "model"
        make = {"adapter": good_adapter, "shards": good_shards}.get(kind)
        good = make(family) if make else good_folder(family, is_scorer=kind == "scorer")
        shutil.copytree(good, place, dirs_exist_ok=True)
        certain = False
        if kind in ("policy", "scorer") and draw.random() < 0.6:
            text, certain = mutate_tensors(draw, place / WEIGHTS)
        else:
            names = {"adapter": ["adapter_config.json"] * 3 + ["adapter_model.safetensors"]}
            names["shards"] = [INDEX] * 3 + sorted(p.name for p in place.glob("*.safetensors"))[:1]
            text = mutate(draw, place / draw.choice(names.get(kind, ["config.json", WEIGHTS])))
        act = _loader(draw, place, is_scorer=kind == "scorer")
        yield Case(f"{family}, {kind}: {text}", act, certain)


def _loader(draw: Random, place: Path, *, is_scorer: bool) -> Callable[[], object]:
    source, tokenizer = ModelSource(key="model.path", path=str(place)), small_tokenizer()
    shard = draw.choice([None, lambda parameter: parameter.detach()])
    if not is_scorer:
        return lambda: build_actor(source, tokenizer, seed=1, shard=shard)

    def reward_model() -> Any:
        require_one_label_model(source)
        return build_scorer(source, tokenizer, seed=1, shard=shard)

    return reward_model


def tokenizer_cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield damaged tokenizer folders, loaded and used."""
    while True:
        place = folder / "tokenizer"
        place.mkdir(exist_ok=True)
        small_tokenizer().save_pretrained(place)
        text = mutate(draw, place / draw.choice(["tokenizer.json"] * 3 + ["tokenizer_config.json"]))
        yield Case(text, partial(_encode, place), must_refuse=False)


def _encode(place: Path) -> None:
    encoder = Encoder(load_tokenizer(place, key="model.tokenizer"))
    encoder.encode_prompts(["some words to learn from 🙂"])
