"""Dividing data over the three phases, and over training and evaluation, without leaks.

Records with the same prompt (those without one: with the same text) are a *group*. A group is never
torn apart: all of it lands in one phase, and there on one side, so that no model is evaluated on,
or learns PPO from, a prompt whose answers an earlier phase was trained on.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from rlhf.config.choices import SPLIT_PHASES, Phase
from rlhf.data.records import Record
from rlhf.data.sources import RawDataset
from rlhf.errors import DataError


class Part(NamedTuple):
    """The records of one phase; ``removed`` counts training records whose prompt is held out."""

    train: list[Record]
    eval: list[Record]
    removed: int = 0


def largest_remainder(total: int, proportions: Sequence[float]) -> list[int]:
    """Whole numbers that sum to ``total`` and follow ``proportions``.

    Each gets its quota rounded down; what is left goes, one each, to the largest fractions (the
    earlier of two equal ones). The proportions are finite, at least 0, and not all 0.
    """
    exact = [Fraction(proportion) for proportion in proportions]
    quotas = [total * proportion / sum(exact) for proportion in exact]
    sizes = [int(quota) for quota in quotas]
    by_fraction = sorted(range(len(sizes)), key=lambda i: sizes[i] - quotas[i])
    for index in by_fraction[: total - sum(sizes)]:
        sizes[index] += 1
    return sizes


def divide(
    dataset: RawDataset, *, split: list[float], eval_share: float, seed: int
) -> dict[Phase, Part]:
    """Divide ``dataset`` over the phases in proportions ``split``, always the same by ``seed``.

    Of each phase's part ``eval_share`` is held out: at least one record, and never all of them.
    Where the data set has held-out records of its own these are divided over the phases instead,
    and training records with the prompt of any of them are removed.

    Raises:
        DataError: a phase with a positive share would get nothing to train on or nothing held out.
    """
    own_eval = dataset.eval
    rng = random.Random(f"split-{seed}")
    if own_eval is None:
        sizes = [
            size
            for part in largest_remainder(len(dataset.train), split)
            for size in _train_and_eval(part, eval_share)
        ]
        filled = _fill(dataset.train, sizes, rng=rng)
        parts = [Part(*pair) for pair in zip(filled[::2], filled[1::2], strict=True)]
    else:
        train = _fill(dataset.train, largest_remainder(len(dataset.train), split), rng=rng)
        held_out = _fill(own_eval, largest_remainder(len(own_eval), split), rng=rng)
        parts = [
            _without_leaks(Part(*pair), own_eval) for pair in zip(train, held_out, strict=True)
        ]
    for phase, share, part in zip(SPLIT_PHASES, split, parts, strict=True):
        if share > 0 and not (part.train and part.eval):
            raise DataError(_too_small(dataset, phase, part, split))
    return dict(zip(SPLIT_PHASES, parts, strict=True))


def blend(parts: list[Part], *, seed: int) -> Part:
    """One phase's parts of several data sets as one, train and eval each in random order.

    Training records whose prompt is held out in any of the parts are removed and counted.

    Raises:
        DataError: nothing to train on is left.
    """
    train = [record for part in parts for record in part.train]
    held_out = [record for part in parts for record in part.eval]
    removed = sum(part.removed for part in parts)
    blended = _without_leaks(Part(train, held_out, removed), held_out)
    if train and not blended.train:
        raise DataError(
            f"Every prompt of the {len(train)} training examples is held out too: nothing is left "
            "to train on. Give data.path examples with prompts that data.eval_path does not have."
        )
    random.Random(f"blend-train-{seed}").shuffle(blended.train)
    random.Random(f"blend-eval-{seed}").shuffle(blended.eval)
    return blended


def _train_and_eval(size: int, eval_share: float) -> tuple[int, int]:
    _, wanted = largest_remainder(size, [1 - eval_share, eval_share])
    held_out = min(max(wanted, 1), size - 1) if size else 0
    return size - held_out, held_out


def _group_key(record: Record) -> str | None:
    return record.text if record.prompt is None else record.prompt


def _without_leaks(part: Part, held_out: Iterable[Record]) -> Part:
    known = {_group_key(record) for record in held_out}
    train = [record for record in part.train if _group_key(record) not in known]
    return Part(train, part.eval, part.removed + len(part.train) - len(train))


def _fill(records: list[Record], sizes: list[int], *, rng: random.Random) -> list[list[Record]]:
    """Put whole groups of records into bins so that these have about the wanted ``sizes``.

    The sizes are met exactly where every group is a single record. No bin with a wanted size stays
    empty while there are as many groups as such bins.
    """
    by_key: defaultdict[str | None, list[Record]] = defaultdict(list)
    for record in records:
        by_key[_group_key(record)].append(record)
    groups = list(by_key.values())
    rng.shuffle(groups)
    groups.sort(key=len, reverse=True)  # stable; small groups come last and even the sizes out
    bins: list[list[Record]] = [[] for _ in sizes]
    for left, group in zip(range(len(groups), 0, -1), groups, strict=True):
        bins[_bin_for(len(group), bins, sizes=sizes, groups_left=left)].extend(group)
    return bins


def _bin_for(group: int, bins: list[list[Record]], *, sizes: list[int], groups_left: int) -> int:
    """The bin, of those that the group fits in (else of all), that is filled the least."""
    wanted = [index for index, size in enumerate(sizes) if size]
    empty = [index for index in wanted if not bins[index]]
    if groups_left <= len(empty):
        wanted = empty
    room = {index: sizes[index] - len(bins[index]) for index in wanted}
    fitting = [index for index in wanted if group <= room[index]]
    return max(fitting or wanted, key=lambda index: (room[index] / sizes[index], room[index]))


def _too_small(dataset: RawDataset, phase: Phase, part: Part, split: list[float]) -> str:
    own_eval = "" if dataset.eval is None else f" and {len(dataset.eval)} held-out ones"
    removed = f" ({part.removed} removed, as their prompts are held out)" if part.removed else ""
    return (
        f"Data set {dataset.name} has {len(dataset.train)} examples{own_eval}. Divided by "
        f"data.split={split}, the {phase} phase gets {len(part.train)} to train on{removed} and "
        f"{len(part.eval)} held out; it needs at least one of each, and examples with the same "
        "prompt stay together. Give more examples with different prompts, or set the share of the "
        "phases that you do not run to 0."
    )
