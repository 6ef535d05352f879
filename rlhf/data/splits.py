"""Divide data over phases, and over training and evaluation, without leaks between them.

Records with the same prompt (or, without a prompt, the same text) are a *group*, across all
datasets and ignoring whitespace and case. A group is never divided: all its records go to one
phase, and there either to training or to evaluation. No model is therefore evaluated on, or trained
by PPO on, a prompt whose answers an earlier phase was trained on.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rlhf.base.errors import DataError
from rlhf.config.choices import SPLIT_PHASES, Phase
from rlhf.data.records import RawDataset, Record
from rlhf.data.stored import Numbers, facts_of, join, number_groups, take

Bin = int  # 2 * index of the phase, and 1 more if held out
BINS: Sequence[Bin] = range(2 * len(SPLIT_PHASES))
NO_BIN, REMOVED = -1, -2  # stored instead of a bin


# What PPO needs beside prompts, if the data has no answers to learn a model and a reward from.
WITH_OWN_REWARD = (
    " model=pretrained model.path=FOLDER_OR_ID "
    "'rewards.NAME={kind: function, function: \"MODULE:FUNCTION\", run_code: true}' "
    "(a reward of your own: docs/rewards.md)"
)


class PhaseData(NamedTuple):
    """The records that one phase learns from, and its held-out records.

    ``removed`` counts training records whose prompt is held out, and records whose prompt belongs
    to a phase that does not use their dataset.
    """

    train: Sequence[Record]
    eval: Sequence[Record]
    removed: int = 0


class _Places(NamedTuple):
    """The records of a phase in one dataset, as indices in the dataset's ``train``.

    If the dataset comes with held-out records, ``eval`` has indices of these.
    """

    train: Numbers
    eval: Numbers
    removed: int


def apportion(total: int, proportions: Sequence[float]) -> list[int]:
    """Divide ``total`` into integers by ``proportions``, with the largest remainder method.

    Each integer is its share rounded down; the integers with the largest fractional parts get one
    more (on a tie, the earlier index). The proportions must be finite, at least 0, and not all 0.
    """
    exact = [Fraction(proportion) for proportion in proportions]
    quotas = [total * proportion / sum(exact) for proportion in exact]
    sizes = [int(quota) for quota in quotas]
    by_fraction = sorted(range(len(sizes)), key=lambda i: sizes[i] - quotas[i])
    for index in by_fraction[: total - sum(sizes)]:
        sizes[index] += 1
    return sizes


def divide_over_phases(
    datasets: Sequence[RawDataset], *, split: list[float], eval_share: float, seed: int
) -> dict[Phase, list[PhaseData]]:
    """Divide each of ``datasets`` over its phases by ``split``, deterministically per ``seed``.

    A share ``eval_share`` of each phase's part is held out: at least one record, but never all.
    If a dataset comes with held-out records, these are divided over the phases instead. Training
    records whose prompt is held out in any phase and dataset are removed; the others are then
    repeated ``weight`` times.

    Raises:
        DataError: if a phase with a positive share gets no training or no held-out records.
    """
    sides = [side for dataset in datasets for side in (dataset.train, dataset.eval or [])]
    ends = np.cumsum([0, *map(len, sides)])
    numbers = number_groups(np.concatenate([facts_of(side, "prompt_key") for side in sides]))
    groups_of_sides = [numbers[start:end] for start, end in pairwise(ends)]
    groups = list(zip(groups_of_sides[::2], groups_of_sides[1::2], strict=True))
    bins = np.full(int(numbers.max(initial=-1)) + 1, NO_BIN, np.int8)  # of each group
    shares = [_phase_shares(dataset, split) for dataset in datasets]
    # Datasets of few phases are divided first: their prompts keep the phase in later datasets.
    order = sorted(range(len(datasets)), key=lambda i: sum(share > 0 for share in shares[i]))
    places_of_dataset = {
        i: _divide_dataset(datasets[i], groups[i], shares[i], eval_share, seed, bins) for i in order
    }
    is_held_out = np.zeros(len(bins), bool)
    for i, places in places_of_dataset.items():
        train_groups, eval_groups = groups[i]
        eval_source = train_groups if datasets[i].eval is None else eval_groups
        for part in places:
            is_held_out[eval_source[part.eval]] = True
    divided: dict[Phase, list[PhaseData]] = {}
    for index, phase in enumerate(SPLIT_PHASES):
        parts = [
            _drop_held_out_prompts(places_of_dataset[i][index], is_held_out[groups[i][0]])
            for i in range(len(datasets))
        ]
        has_examples = any(share[index] > 0 for share in shares)
        if has_examples and not (
            any(len(p.train) for p in parts) and any(len(p.eval) for p in parts)
        ):
            raise DataError(_too_small_message(datasets, phase, parts, split))
        divided[phase] = [
            PhaseData(
                take(d.train, _repeat_by_weight(part.train, d.weight, f"weight-{phase}-{seed}")),
                take(d.train if d.eval is None else d.eval, part.eval),
                part.removed,
            )
            for part, d in zip(parts, datasets, strict=True)
        ]
    return divided


def blend_datasets(parts: list[PhaseData], *, seed: int) -> PhaseData:
    """Merge one phase's parts of several datasets; shuffle the training and held-out records."""
    train = _shuffle(join([part.train for part in parts]), f"blend-train-{seed}")
    held_out = _shuffle(join([part.eval for part in parts]), f"blend-eval-{seed}")
    return PhaseData(train, held_out, sum(part.removed for part in parts))


def _shuffle(records: Sequence[Record], stream: str) -> Sequence[Record]:
    order = list(range(len(records)))
    random.Random(stream).shuffle(order)
    return take(records, order)


def swap_answers(part: PhaseData, *, share: float, seed: int) -> PhaseData:
    """Return ``part`` with chosen and rejected swapped in a random ``share`` of the training pairs.

    ``seed`` selects these pairs. Source, with a share of 0.25: https://arxiv.org/abs/2310.02743.
    """
    pairs = [place for place, record in enumerate(part.train) if record.rejected is not None]
    train = list(part.train)
    for place in random.Random(f"label-noise-{seed}").sample(pairs, round(share * len(pairs))):
        record = train[place]
        train[place] = record._replace(chosen=record.rejected, rejected=record.chosen)
    return part._replace(train=train)


def phase_of_dpo_prompts(parts: Mapping[Phase, PhaseData]) -> Phase:
    """Return the phase whose held-out prompts DPO answers: PPO, or reward if PPO has none."""
    return Phase.ppo if parts[Phase.ppo].eval else Phase.reward


def describe_division(
    parts: Mapping[Phase, PhaseData], phases: Sequence[Phase], *, scale: float = 1.0
) -> str:
    """Return one line for the terminal: the numbers of examples of ``phases`` and of other phases.

    Each example in ``parts`` represents ``scale`` examples.
    """
    held_out = {phase: round(scale * len(part.eval)) for phase, part in parts.items()}
    sizes = {phase: round(scale * len(p.train)) + held_out[phase] for phase, p in parts.items()}
    split_phases = [phase.phase_in_split for phase in phases]
    used = (
        f"{phase} {sizes[share]:,} ({held_out[share]:,} held out)"
        for phase, share in zip(phases, split_phases, strict=True)
    )
    total = round(scale * sum(len(part.train) + len(part.eval) for part in parts.values()))
    about = "about " if scale > 1 else ""
    line = f"data: {about}{total:,} examples: {', '.join(used)}"
    others = [phase for phase in sizes if sizes[phase] and phase not in split_phases]
    if not others:
        return line
    line += f"; set aside for {', '.join(others)}: {sum(sizes[phase] for phase in others):,}"
    if len(phases) > 1:  # data.sets or from_run set the other examples aside, not data.split
        return line
    everything = ",".join(str(int(phase in split_phases)) for phase in SPLIT_PHASES)
    return f"{line} (data.split=[{everything}] uses all)"


def check_usable_examples(
    parts: dict[Phase, PhaseData], phases: Sequence[Phase], *, learns_grades: bool = False
) -> None:
    """Raise a DataError if one of ``phases`` has no usable training or held-out examples.

    If ``learns_grades``, the reward model learns from single responses with a grade.
    """
    for phase in phases:
        own = phase.phase_in_split
        for side, records in (("train on", parts[own].train), ("hold out", parts[own].eval)):
            has_grades = own is Phase.reward and any(each.grade is not None for each in records)
            is_graded = has_grades and learns_grades and phase is own
            if is_graded or any(_is_usable(record, phase) for record in records):
                continue
            if has_grades:
                raise DataError(
                    f"data: the {phase} phase learns from pairs of responses, and its examples are "
                    "single responses with a grade. A reward model learns from labels with "
                    "reward.loss=classification, and from scores with reward.loss=regression."
                )
            needed = {Phase.sft: "responses or texts", Phase.ppo: "prompts"}
            everything = [r for each in parts.values() for r in (*each.train, *each.eval)]
            others = [
                f"phase={other}{WITH_OWN_REWARD if other is Phase.ppo else ''}"
                for other in SPLIT_PHASES
                if other is not own and any(_is_usable(record, other) for record in everything)
            ]
            fix = f", or a phase that this data set supports: {' or '.join(others)}"
            raise DataError(
                f"data: the {phase} phase finds no {needed.get(phase, 'pairs of responses')} "
                f"to {side} among its {len(records)} examples. Choose another data set "
                f"(docs/data.md){fix if others else ''}."
            )


def _is_usable(record: Record, phase: Phase) -> bool:
    if phase is Phase.ppo:
        return record.prompt is not None
    if phase is Phase.sft:
        return record.text is not None or record.chosen is not None
    return record.rejected is not None


def _phase_shares(dataset: RawDataset, split: list[float]) -> list[float]:
    """Return each phase's proportion of ``dataset``; equal if ``split`` is 0 for all its phases."""
    if dataset.phases is None:
        return split
    chosen = [phase in dataset.phases for phase in SPLIT_PHASES]
    shares = [share if is_in else 0.0 for share, is_in in zip(split, chosen, strict=True)]
    return shares if any(shares) else [float(is_in) for is_in in chosen]


def _divide_dataset(
    dataset: RawDataset,
    groups: tuple[Numbers, Numbers],
    shares: list[float],
    eval_share: float,
    seed: int,
    bins: Numbers,
) -> list[_Places]:
    """Divide ``dataset`` into a part per phase; store each group's bin in ``bins``.

    ``groups`` has the group of each training record, and of each record that comes held out.
    """
    rng = random.Random(f"split-{seed}")
    sizes = apportion(len(dataset.train), shares)
    size_by_bin = {2 * phase: size for phase, size in enumerate(sizes)}
    if dataset.eval is None:
        sides = [_train_and_eval_sizes(size, eval_share) for size in sizes]
        size_by_bin = dict(enumerate(size for pair in sides for size in pair))
    filled, removed = _fill_bins(groups[0], size_by_bin, bins, shares=shares, rng=rng)
    if dataset.eval is not None:
        eval_sizes = apportion(len(dataset.eval), shares)
        size_by_bin = {2 * phase + 1: size for phase, size in enumerate(eval_sizes)}
        held_out, more_removed = _fill_bins(groups[1], size_by_bin, bins, shares=shares, rng=rng)
        filled, removed = filled | held_out, removed + more_removed
    first_phase = next(phase for phase, share in enumerate(shares) if share > 0)
    return [
        _Places(filled[2 * phase], filled[2 * phase + 1], removed if phase == first_phase else 0)
        for phase in range(len(SPLIT_PHASES))
    ]


def _train_and_eval_sizes(size: int, eval_share: float) -> tuple[int, int]:
    _, eval_size = apportion(size, [1 - eval_share, eval_share])
    held_out = min(max(eval_size, 1), size - 1) if size else 0
    return size - held_out, held_out


def _drop_held_out_prompts(part: _Places, is_held_out: Numbers) -> _Places:
    train = part.train[~is_held_out[part.train]]
    return part._replace(train=train, removed=part.removed + len(part.train) - len(train))


def _repeat_by_weight(places: Numbers, weight: float, stream: str) -> Numbers:
    """Repeat ``places`` ``weight`` times; return at least one place if there are any.

    For the fractional part of ``weight`` a random subset is added; ``stream`` is its seed.
    """
    whole, fraction = divmod(weight, 1)
    count = int(fraction * len(places) + 0.5)
    if len(places) and not whole:
        count = max(count, 1)
    chosen = sorted(random.Random(stream).sample(range(len(places)), count))
    return np.concatenate([*[places] * int(whole), places[chosen]])


def _fill_bins(
    groups: Numbers,
    sizes: dict[Bin, int],
    bins: Numbers,
    *,
    shares: list[float],
    rng: random.Random,
) -> tuple[dict[Bin, Numbers], int]:
    """Divide records by their ``groups``; return the records of each bin, and how many are removed.

    A bin is the training or the held-out side of a phase, with about as many records as in
    ``sizes``. A group with a bin in ``bins`` goes there, or is removed if that bin's phase has no
    share of this dataset. If ``sizes`` has only held-out bins, a group whose bin is a training bin
    gets a new bin. If ``sizes`` has only training bins, a group whose bin is held out goes to the
    training bin of its phase, and is removed as a leak later.

    The sizes are exact if every group is a single record without a bin. No bin with a positive
    size stays empty if there are at least as many groups as such bins.
    """
    known, first, group_of_record, counts = np.unique(
        groups, return_index=True, return_inverse=True, return_counts=True
    )
    known_bins = np.full(len(BINS) + 1, NO_BIN)  # where a group with a bin goes; the last: no bin
    for bin_ in BINS:
        wanted = bin_ if bin_ in sizes else bin_ - bin_ % 2
        has_share = shares[bin_ // 2] > 0
        known_bins[bin_] = (wanted if wanted in sizes else NO_BIN) if has_share else REMOVED
    chosen = known_bins[bins[known]]
    in_order = np.argsort(first)  # groups by their first record
    rest = in_order[chosen[in_order] == NO_BIN].tolist()
    rng.shuffle(rest)
    rest = np.array(rest, np.int64)
    rest = rest[np.argsort(-counts[rest], kind="stable")]  # small groups last, to even out sizes
    filled = {bin_: int(counts[chosen == bin_].sum()) for bin_ in sizes}
    chosen_before = in_order[chosen[in_order] >= 0]
    chosen[rest] = _choose_bins(counts[rest], filled, sizes)
    bins[known[rest]] = chosen[rest]
    position = np.zeros(len(known), np.int64)
    position[np.concatenate([chosen_before, rest])] = np.arange(len(chosen_before) + len(rest))
    order = np.argsort(position[group_of_record], kind="stable")
    bin_of_record = chosen[group_of_record][order]
    removed = int((bin_of_record == REMOVED).sum())
    return {bin_: order[bin_of_record == bin_] for bin_ in sizes}, removed


def _choose_bins(groups: Numbers, filled: dict[Bin, int], sizes: dict[Bin, int]) -> Numbers:
    """Return the bin of each group; ``groups`` has their sizes, the largest first.

    ``_choose_bin`` chooses one after another, given ``filled``, the records in each bin so far.
    """
    num_bins = sum(size > 0 for size in sizes.values())
    falling, chosen, done = -groups, np.empty(len(groups), np.int64), 0
    while done < len(groups):
        size, groups_left = int(groups[done]), len(groups) - done
        same = int(np.searchsorted(falling, -size, side="right")) - done
        # While more groups are left than there are bins, no bin has to be filled by the next group.
        run = _fill_evenly(size, min(same, groups_left - num_bins), filled, sizes)
        if not len(run):
            run = np.array([_choose_bin(size, filled, sizes=sizes, groups_left=groups_left)])
            filled[run[0]] += size
        chosen[done : done + len(run)] = run
        done += len(run)
    return chosen


def _fill_evenly(group: int, most: int, filled: dict[Bin, int], sizes: dict[Bin, int]) -> Numbers:
    """Return the bins of up to ``most`` groups of one size that fit; add them to ``filled``.

    The room of a bin decreases with each of its groups. Taking the emptiest bin repeatedly is
    therefore the same as sorting the rooms that all bins will have.
    """
    rooms = {
        bin_: np.arange(size - filled[bin_], group - 1, -group)[: max(most, 0)]
        for bin_, size in sizes.items()
        if size
    }
    lengths = [len(room) for room in rooms.values()]
    bins, room = np.repeat(list(rooms), lengths), np.concatenate(list(rooms.values()))
    share = room / np.repeat([sizes[bin_] for bin_ in rooms], lengths)
    order = np.lexsort((np.repeat(range(len(rooms)), lengths), -room, -share))[: max(most, 0)]
    for bin_ in rooms:
        filled[bin_] += group * int((bins[order] == bin_).sum())
    return bins[order]


def _choose_bin(
    group: int, filled: dict[Bin, int], *, sizes: dict[Bin, int], groups_left: int
) -> Bin:
    """Return the emptiest bin with room for ``group`` records; if none has, the emptiest bin."""
    candidates = [bin_ for bin_, size in sizes.items() if size]
    empty = [bin_ for bin_ in candidates if not filled[bin_]]
    if groups_left <= len(empty):  # each remaining group must fill an empty bin
        candidates = empty
    room = {bin_: sizes[bin_] - filled[bin_] for bin_ in candidates}
    fitting = [bin_ for bin_ in candidates if group <= room[bin_]]
    return max(fitting or candidates, key=lambda bin_: (room[bin_] / sizes[bin_], room[bin_]))


def _too_small_message(
    datasets: Sequence[RawDataset], phase: Phase, parts: list[_Places], split: list[float]
) -> str:
    names = ", ".join(dataset.name for dataset in datasets)
    what = f"Data set {names} has" if len(datasets) == 1 else f"Data sets {names} have"
    held_out = sum(len(dataset.eval or ()) for dataset in datasets)
    own_eval = f" and {held_out} held-out ones" if held_out else ""
    removed = sum(part.removed for part in parts)
    gone = f" ({removed} removed: prompts held out, or of another phase)" if removed else ""
    return (
        f"{what} {sum(len(dataset.train) for dataset in datasets)} examples{own_eval}. Divided by "
        f"data.split={split}, the {phase} phase gets {sum(len(p.train) for p in parts)} to train "
        f"on{gone} and {sum(len(p.eval) for p in parts)} held out; the phase needs at least one of "
        "each, and examples with the same prompt stay together. Give more examples with different "
        "prompts, or set the share of the phases that you do not run to 0."
    )
