"""Damaged files of the further members of a reward ensemble."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf.models.build import build_scorer
from rlhf.models.sources import ModelSource
from rlhf.options.ensembles.keys import CombineName
from rlhf.options.ensembles.members import (
    MEMBERS_FILE,
    Combination,
    grow_members,
    load_ensemble,
    save_members,
)
from tests.fuzz.case import Case
from tests.models_on_disk import small_tokenizer, some_ids
from tests.options.trunk.test_trunk import deep_source

GROWING: Any = SimpleNamespace(num_own_layers=lambda total: total // 2, combine=CombineName.mean)
THREE = Combination(3, CombineName.mean)
Weights = dict[str, Tensor]


@cache
def good_folder() -> Path:
    """A folder with an intact ensemble of three, made once."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf-fuzz-"))
    scorer = build_scorer(deep_source("llama"), small_tokenizer(), seed=1)
    scorer.pretrained.save_pretrained(folder)
    save_members(folder, grow_members(scorer, GROWING, seeds=[2, 3]), torch.zeros(3))
    return folder


def use(folder: Path) -> None:
    """Load an ensemble as a run does, and score with it."""
    source = ModelSource(key="reward_model.path", path=str(folder))
    scorer = build_scorer(source, small_tokenizer(), seed=1)
    assert load_ensemble(scorer, source, THREE)(some_ids()).isfinite().all()


def _rename(draw: Random, weights: Weights, name: str) -> None:
    new = ("x", "1.branch.blocks.abc.x", f"9{name}", name[2:], "\x1b[2J", "1.branch.blocks.99.w")
    weights[draw.choice(new)] = weights.pop(name)


def _retype(draw: Random, weights: Weights, name: str) -> None:
    kinds = (torch.int8, torch.bool, torch.complex64, torch.int64)
    weights[name] = weights[name].to(draw.choice(kinds))


def _reshape(draw: Random, weights: Weights, name: str) -> None:
    shapes = ((), (0,), (7,), (3, 2), (1, 1, 1))
    weights[name] = torch.zeros(draw.choice(shapes))


def _poison(draw: Random, weights: Weights, name: str) -> None:
    weights[name].view(-1)[0] = draw.choice([torch.nan, torch.inf, -torch.inf])


def _add(draw: Random, weights: Weights, name: str) -> None:
    weights[draw.choice([f"3{name[1:]}", "offset", "4.head.weight"])] = weights[name].clone()


def _only(_: Random, weights: Weights, name: str) -> None:
    kept = weights[name]
    weights.clear()
    weights[name] = kept


def _drop(_: Random, weights: Weights, name: str) -> None:
    del weights[name]


Damage = Callable[[Random, Weights, str], None]
DAMAGES: tuple[Damage, ...] = (_rename, _retype, _reshape, _poison, _add, _only, _drop)


def damaged(draw: Random, folder: Path, damage: Damage, name: str) -> Path:
    """Copy the intact ensemble to ``folder``, with a damaged tensor ``name``."""
    shutil.copytree(good_folder(), folder, dirs_exist_ok=True)
    weights = {key: tensor.clone() for key, tensor in load_file(folder / MEMBERS_FILE).items()}
    name = name if name in weights else min(weights)
    damage(draw, weights, name)
    save_file(weights, folder / MEMBERS_FILE)
    return folder


def cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield ensembles of which one tensor, and sometimes the end of the file, are damaged."""
    while True:
        damage = draw.choice(DAMAGES)
        names = ["offsets", *sorted(load_file(good_folder() / MEMBERS_FILE))]
        name = draw.choice(names)
        damaged(draw, folder, damage, name)
        text = f"{damage.__name__} {name}"
        if draw.random() < 0.2:
            file = folder / MEMBERS_FILE
            file.write_bytes(file.read_bytes()[: draw.randrange(100)])
            text += " and cut"
        yield Case(text, partial(use, folder), must_refuse=True)
