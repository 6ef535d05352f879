"""Divide data over phases, and over training and evaluation, without leaks between them.

Records with the same prompt (or, without a prompt, the same text) are a *group*, across all
datasets and ignoring whitespace and case. A group is never divided: all its records go to one
phase, and there either to training or to evaluation. No model is therefore evaluated on, or trained
by PPO on, a prompt whose answers an earlier phase was trained on.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from rlhf.base.errors import DataError
from rlhf.config.choices import SPLIT_PHASES, Phase
from rlhf.data.records import RawDataset, Record, fingerprint
from rlhf.options import UNPAIRED_LOSSES

Key = bytes
Bin = tuple[int, bool]  # index of the phase, True if held out
BINS: list[Bin] = [(phase, side) for phase in range(len(SPLIT_PHASES)) for side in (False, True)]


class PhaseData(NamedTuple):
    """The records that one phase learns from, and its held-out records.

    ``removed`` counts training records whose prompt is held out, and records whose prompt belongs
    to a phase that does not use their dataset.
    """

    train: list[Record]
    eval: list[Record]
    removed: int = 0


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
    places: dict[Key, Bin] = {}
    shares = [_phase_shares(dataset, split) for dataset in datasets]
    # Datasets of few phases are divided first: their prompts keep the phase in later datasets.
    order = sorted(range(len(datasets)), key=lambda i: sum(share > 0 for share in shares[i]))
    found = {i: _divide_dataset(datasets[i], shares[i], eval_share, seed, places) for i in order}
    held_out = {prompt_key(r) for parts in found.values() for part in parts for r in part.eval}
    divided: dict[Phase, list[PhaseData]] = {}
    for index, phase in enumerate(SPLIT_PHASES):
        parts = [_drop_held_out_prompts(found[i][index], held_out) for i in range(len(datasets))]
        is_for_some = any(share[index] > 0 for share in shares)
        if is_for_some and not (any(p.train for p in parts) and any(p.eval for p in parts)):
            raise DataError(_too_small_message(datasets, phase, parts, split))
        divided[phase] = [
            part._replace(train=_repeat_by_weight(part.train, d.weight, f"weight-{phase}-{seed}"))
            for part, d in zip(parts, datasets, strict=True)
        ]
    return divided


def blend_datasets(parts: list[PhaseData], *, seed: int) -> PhaseData:
    """Merge one phase's parts of several datasets; shuffle the training and held-out records."""
    train = [record for part in parts for record in part.train]
    held_out = [record for part in parts for record in part.eval]
    random.Random(f"blend-train-{seed}").shuffle(train)
    random.Random(f"blend-eval-{seed}").shuffle(held_out)
    return PhaseData(train, held_out, sum(part.removed for part in parts))


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
    own = [phase.phase_in_split for phase in phases]
    used = (
        f"{phase} {sizes[share]:,} ({held_out[share]:,} held out)"
        for phase, share in zip(phases, own, strict=True)
    )
    total = round(scale * sum(len(part.train) + len(part.eval) for part in parts.values()))
    about = "about " if scale > 1 else ""
    line = f"data: {about}{total:,} examples: {', '.join(used)}"
    others = [phase for phase in sizes if sizes[phase] and phase not in own]
    if not others:
        return line
    line += f"; set aside for {', '.join(others)}: {sum(sizes[phase] for phase in others):,}"
    if len(phases) > 1:  # data.sets or from_run set the other examples aside, not data.split
        return line
    everything = ",".join(str(int(phase in own)) for phase in SPLIT_PHASES)
    return f"{line} (data.split=[{everything}] uses all)"


def check_usable_examples(
    parts: dict[Phase, PhaseData], phases: Sequence[Phase], unpaired: Container[Phase] = ()
) -> None:
    """Raise a DataError if one of ``phases`` has no usable training or held-out examples.

    The phases in ``unpaired`` learn from single responses with a grade.
    """
    for phase in phases:
        part = parts[phase.phase_in_split]
        for side, records in (("train on", part.train), ("hold out", part.eval)):
            if phase in unpaired and any(record.grade is not None for record in records):
                continue
            if not any(_is_usable(record, phase) for record in records):
                if phase in UNPAIRED_LOSSES and any(r.grade is not None for r in records):
                    raise DataError(
                        f"data: the {phase} phase learns from pairs of responses, and its examples "
                        f"are single responses with a grade. Use {UNPAIRED_LOSSES[phase]}."
                    )
                needed = {Phase.sft: "responses or texts", Phase.ppo: "prompts"}
                everything = [r for each in parts.values() for r in (*each.train, *each.eval)]
                others = [
                    f"phase={other}"
                    for other in SPLIT_PHASES
                    if other is not phase.phase_in_split
                    and any(_is_usable(record, other) for record in everything)
                ]
                fix = f", or a phase that this one supports: {' or '.join(others)}"
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
    shares: list[float],
    eval_share: float,
    seed: int,
    places: dict[Key, Bin],
) -> list[PhaseData]:
    """Divide ``dataset`` into a part per phase; store each group's phase and side in ``places``."""
    rng = random.Random(f"split-{seed}")
    sizes = apportion(len(dataset.train), shares)
    wanted = {(phase, False): size for phase, size in enumerate(sizes)}
    if dataset.eval is None:
        sides = [_train_and_eval_sizes(size, eval_share) for size in sizes]
        wanted = dict(zip(BINS, (size for pair in sides for size in pair), strict=True))
    bins, removed = _fill_bins(dataset.train, wanted, places, shares=shares, rng=rng)
    if dataset.eval is not None:
        own = apportion(len(dataset.eval), shares)
        wanted = {(phase, True): size for phase, size in enumerate(own)}
        held_out, more = _fill_bins(dataset.eval, wanted, places, shares=shares, rng=rng)
        bins, removed = bins | held_out, removed + more
    first = next(phase for phase, share in enumerate(shares) if share > 0)
    return [
        PhaseData(bins[phase, False], bins[phase, True], removed if phase == first else 0)
        for phase in range(len(SPLIT_PHASES))
    ]


def _train_and_eval_sizes(size: int, eval_share: float) -> tuple[int, int]:
    _, wanted = apportion(size, [1 - eval_share, eval_share])
    held_out = min(max(wanted, 1), size - 1) if size else 0
    return size - held_out, held_out


def prompt_key(record: Record) -> Key:
    """Return the key of a record's group: a hash of its prompt, or without a prompt of its text."""
    return fingerprint(record.text if record.prompt is None else record.prompt)


def _drop_held_out_prompts(part: PhaseData, held_out: Container[Key]) -> PhaseData:
    train = [record for record in part.train if prompt_key(record) not in held_out]
    return PhaseData(train, part.eval, part.removed + len(part.train) - len(train))


def _repeat_by_weight(records: list[Record], weight: float, stream: str) -> list[Record]:
    """Repeat ``records`` ``weight`` times; return at least one record if there are any.

    For the fractional part of ``weight`` a random subset is added; ``stream`` is its seed.
    """
    whole, fraction = divmod(weight, 1)
    count = int(fraction * len(records) + 0.5)
    if records and not whole:
        count = max(count, 1)
    chosen = sorted(random.Random(stream).sample(range(len(records)), count))
    return records * int(whole) + [records[index] for index in chosen]


def _fill_bins(
    records: list[Record],
    sizes: dict[Bin, int],
    places: dict[Key, Bin],
    *,
    shares: list[float],
    rng: random.Random,
) -> tuple[dict[Bin, list[Record]], int]:
    """Divide groups of records over bins; return the bins, and the number of removed records.

    A bin is the training or the held-out side of a phase, with about as many records as in
    ``sizes``. A group in ``places`` goes to the bin there, or is removed if that bin's phase has no
    share of this dataset. If ``sizes`` has only held-out bins, a group whose place is a training
    bin gets a new place. If ``sizes`` has only training bins, a group whose place is a held-out bin
    goes to the training bin of its phase, and is removed as a leak later.

    The sizes are exact if every group is a single record without a place. No bin with a positive
    size stays empty if there are at least as many groups as such bins.
    """
    by_key: defaultdict[Key, list[Record]] = defaultdict(list)
    for record in records:
        by_key[prompt_key(record)].append(record)
    bins: dict[Bin, list[Record]] = {bin_: [] for bin_ in sizes}
    removed = 0
    for key in [key for key in by_key if key in places]:
        place, for_training = places[key], (places[key][0], False)
        if shares[place[0]] == 0:
            removed += len(by_key.pop(key))
        elif place in bins or for_training in bins:
            bins[place if place in bins else for_training].extend(by_key.pop(key))
    groups = list(by_key.items())
    rng.shuffle(groups)
    groups.sort(key=lambda item: len(item[1]), reverse=True)  # small groups last, to even out sizes
    for left, (key, group) in zip(range(len(groups), 0, -1), groups, strict=True):
        places[key] = _choose_bin(len(group), bins, sizes=sizes, groups_left=left)
        bins[places[key]].extend(group)
    return bins, removed


def _choose_bin(
    group: int, bins: dict[Bin, list[Record]], *, sizes: dict[Bin, int], groups_left: int
) -> Bin:
    """Return the emptiest bin with room for ``group`` records; if none has, the emptiest bin."""
    wanted = [bin_ for bin_, size in sizes.items() if size]
    empty = [bin_ for bin_ in wanted if not bins[bin_]]
    if groups_left <= len(empty):  # each remaining group must fill an empty bin
        wanted = empty
    room = {bin_: sizes[bin_] - len(bins[bin_]) for bin_ in wanted}
    fitting = [bin_ for bin_ in wanted if group <= room[bin_]]
    return max(fitting or wanted, key=lambda bin_: (room[bin_] / sizes[bin_], room[bin_]))


def _too_small_message(
    datasets: Sequence[RawDataset], phase: Phase, parts: list[PhaseData], split: list[float]
) -> str:
    names = ", ".join(dataset.name for dataset in datasets)
    what = f"Data set {names} has" if len(datasets) == 1 else f"Data sets {names} have"
    held_out = sum(len(dataset.eval or ()) for dataset in datasets)
    own_eval = f" and {held_out} held-out ones" if held_out else ""
    removed = sum(part.removed for part in parts)
    gone = f" ({removed} removed, as their prompts are held out)" if removed else ""
    return (
        f"{what} {sum(len(dataset.train) for dataset in datasets)} examples{own_eval}. Divided by "
        f"data.split={split}, the {phase} phase gets {sum(len(p.train) for p in parts)} to train "
        f"on{gone} and {sum(len(p.eval) for p in parts)} held out; the phase needs at least one of "
        "each, and examples with the same prompt stay together. Give more examples with different "
        "prompts, or set the share of the phases that you do not run to 0."
    )
