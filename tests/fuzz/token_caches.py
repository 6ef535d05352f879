"""Damaged entries of the cache of token ids: they are refused, or tokenised again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

from rlhf.config.choices import Phase
from rlhf.data.records import Record
from rlhf.data.splits import PhaseData
from rlhf.data.tokens import Limit, tokenise
from tests.fuzz.case import Case
from tests.fuzz.mutations import mutate, mutate_bytes
from tests.models_on_disk import small_tokenizer

Sides = list[list[dict[str, object]]]


def read(cache: Path, phase: Phase) -> Sides:
    """Return the rows of both sides of a small data set, by way of the cache."""
    rows = [
        Record(prompt=f"What is {n}?", chosen=f" It is {n}.", rejected=" I do not know.")
        for n in range(6)
    ]
    found = tokenise(
        PhaseData(train=rows[:4], eval=rows[4:]),
        phase,
        small_tokenizer(),
        limit=Limit("sft.max_tokens", 200),
        cache_dir=cache,
    )
    return [found.train[:], found.eval[:]]


def same(cache: Path, phase: Phase, whole: Sides) -> None:
    """Read the damaged entry; rows that are not those of the data are a fault."""
    assert read(cache, phase) == whole, "accepted in silence: other rows"


def cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield entries of which one file is damaged, exchanged or of another kind."""
    while True:
        cache = folder / "cache"
        phase = draw.choice([Phase.sft, Phase.reward, Phase.ppo])
        whole = read(cache, phase)
        entry = next(path for path in (cache / "tokens").iterdir() if path.is_dir())
        path = draw.choice(sorted(path for path in entry.rglob("*") if path.is_file()))
        match draw.choice(["damage", "damage", "ids", "exchange", "folder", "owner"]):
            case "damage":
                what = mutate(draw, path)
            case "ids":
                path = next(entry.glob("train/*.arrow"))
                what = f"{path.name}: {mutate_bytes(draw, path)}"
            case "exchange":
                for side in ("train", "eval"):
                    (entry / side).rename(entry / f"{side}-")
                (entry / "train-").rename(entry / "eval")
                (entry / "eval-").rename(entry / "train")
                what = "train and eval exchanged"
            case "folder":
                part = draw.choice([entry, entry / "train"])
                part.rename(folder / "moved")
                if draw.random() < 0.5:
                    part.symlink_to(folder / "moved")
                what = f"{part.name} moved{' behind a link' * part.is_symlink()}"
            case _:
                for each in (entry, *entry.rglob("*")):
                    os.chmod(each, 0o777)
                what = "everybody may write"
        yield Case(f"{phase}, {what}", partial(same, cache, phase, whole), must_refuse=False)
        shutil.rmtree(folder)
