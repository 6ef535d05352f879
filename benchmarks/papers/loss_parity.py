"""Losses, gradients and advantages of TRL, verl, OpenRLHF and AgileRL beside ours."""

from __future__ import annotations

from collections.abc import Mapping

from papers import parity_agilerl, parity_openrlhf, parity_trl, parity_verl
from papers.claims import Figures, Outcome, PaperResult, Place, Verdict
from papers.parity_sides import Inputs, Pair
from papers.peer_wheels import VERSIONS, Wheels
from papers.pooled import pooled

EQUAL = 1e-6
REAL = 10  # times: so much larger is a named difference than what remains without it
PEERS = {
    "TRL": parity_trl.pairs,
    "verl": parity_verl.pairs,
    "OpenRLHF": parity_openrlhf.pairs,
    "AgileRL": parity_agilerl.pairs,
}


def all_pairs(wheels: Wheels) -> dict[str, Pair]:
    """Return all comparisons, by peer and quantity."""
    named = [
        (f"{peer}: {pair.quantity}", pair)
        for peer, pairs_of in PEERS.items()
        for pair in pairs_of(wheels)
    ]
    found = dict(named)
    assert len(found) == len(named)
    return found


def measure(seed: int, place: Place) -> Figures:
    """Return the gap of each pair, and the gap without the named difference if there is one."""
    inputs = Inputs.draw(seed)
    gaps: dict[str, list[float]] = {}
    for name, pair in all_pairs(Wheels.fetch(place.shared / "wheels")).items():
        gaps[name] = [pair.as_is(inputs).gap]
        if pair.undone is not None:
            gaps[name].append(pair.undone(inputs).gap)
    return dict(gaps)


def largest_gaps(figures: Mapping[int, Figures]) -> dict[str, list[float]]:
    """Return the gaps of each pair, the largest over the seeds."""
    names = next(iter(figures.values()))
    return {name: pooled(figures, name).amax(dim=0).tolist() for name in names}


def judge(figures: Mapping[int, Figures]) -> Verdict:
    """Judge every pair by its largest gaps."""
    gaps = largest_gaps(figures)
    equal = {name: each[0] for name, each in gaps.items() if len(each) == 1}
    named = {name: each for name, each in gaps.items() if len(each) > 1}
    unexplained = [name for name, gap in equal.items() if not gap <= EQUAL]
    unexplained += [name for name, (_, rest) in named.items() if not rest <= EQUAL]
    vacuous = [name for name, (gap, rest) in named.items() if not gap > REAL * rest]
    rest = max([*equal.values(), *(each[1] for each in named.values())])
    found = (
        f"{len(gaps)} pairs: {len(equal)} are equal, {len(named)} have a named difference; the"
        f" largest gap without it is {rest:.0e}"
        + "".join(f"; unexplained: {name}" for name in unexplained)
        + "".join(f"; the named difference makes none: {name}" for name in vacuous)
    )
    return Verdict(Outcome.FAILED if unexplained or vacuous else Outcome.PASSED, found)


RESULT = PaperResult(
    title="Losses and gradients beside four other projects",
    source=", ".join(f"{peer} {version}" for peer, version in VERSIONS.items())
    + ": the functions that benchmarks/losses.md names",
    claim=(
        "Losses of the same name have the same value and gradient in TRL, verl, OpenRLHF, AgileRL"
        " and here, except for differences that benchmarks/losses.md names."
    ),
    criterion=(
        f"passed: on random tensors in fp64 every pair is equal to {EQUAL:.0e}, value and gradient,"
        " as a share of the largest element, or has a named difference without which it is; and"
        f" each named difference makes a gap that is more than {REAL} times what remains. failed:"
        " otherwise."
    ),
    minutes=0.2,
    needs="the network once, for four wheels",
    measure=measure,
    judge=judge,
)
