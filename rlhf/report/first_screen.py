"""Build the first screen of a run's page: the verdict, and tiles with its main measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rlhf.base.stored_files import HELD_OUT
from rlhf.config.choices import Phase
from rlhf.report.alarms import MOST_KL, find_doubts
from rlhf.report.charts import RunFiles, number_text
from rlhf.report.gain import TRAINED_ON, read_gain
from rlhf.report.page import Headline
from rlhf.report.summary import describe_objective, duration_text
from rlhf.run.results import finished_phases
from rlhf.run.step_alarms import describe_divergence

MEANINGS = {  # measure in result.json -> what its value is
    "exact": "share of the answers without a mistake",
    "gold": "mean of a rule that knows the right answers, 0 to 1",
    "score": "mean of what PPO maximises, so no proof of quality",
}

ENDS = ("before", "after")  # suffixes of measures


class Tile(NamedTuple):
    """A measure before and after training, with a note; "" stands for a missing value."""

    label: str
    before: str
    after: str
    note: str = ""


def read_verdict(run: RunFiles) -> Headline:
    """Return the headline: what training gained, its interval, and the number of doubts."""
    diverged = describe_divergence(run.alarms)
    if run.result is None:
        names = finished_phases(run.folder)
        done = f"finished phases: {', '.join(names)}" if names else "no phase finished"
        return Headline(f"{diverged or 'This run has not finished'}; {done}.", is_doubtful=True)
    phases = run.result["phases"]
    doubts = len(run.alarms) + len(find_doubts(phases, run.series))
    gain = read_gain(phases)
    reached = f"objective {run.result['objective']:.3f}, {describe_objective(phases)}"
    if gain is not None:
        reached = gain.text
        if gain.interval_text:
            reached += f" (95 % interval of the gain {gain.interval_text}; one seed)"
        elif prompts := count_held_out(run):
            reached += f" ({prompts} held-out prompts are too few to measure it)"
    counted = {0: "no reason found", 1: "1 reason"}.get(doubts, f"{doubts} reasons")
    is_proven = doubts == 0 and (gain is None or gain.is_proven)
    return Headline(f"{diverged or reached}; {counted} to doubt it", is_doubtful=not is_proven)


def count_held_out(run: RunFiles) -> int:
    """Return how many held-out prompts PPO's evaluations answered; 0 if this is unknown."""
    held_out = HELD_OUT.read(run.folder) or {}
    return len(held_out.get("before", {}).get("score", ()))


def build_tiles(run: RunFiles) -> Iterator[Tile]:
    """Yield up to five tiles: measures of the last phase, its KL and tokens, and the run's time."""
    if (result := run.result) is None:
        return
    phases = result["phases"]
    measures: Mapping[str, Any] = next((phases[p] for p in reversed(Phase) if p in phases), {})
    if (gain := read_gain(phases)) is not None:
        meaning = MEANINGS.get(gain.key, "your own judge")
        size = f"; {prompts} held-out prompts" if (prompts := count_held_out(run)) else ""
        yield Tile(gain.judge, *gain.value_texts, meaning + size)
        if gain.key != TRAINED_ON and f"{TRAINED_ON}_before" in measures:
            before, after = (f"{measures[f'{TRAINED_ON}_{end}']:.3f}" for end in ENDS)
            yield Tile(TRAINED_ON, before, after, MEANINGS[TRAINED_ON])
    elif "accuracy" in measures:
        low, high = measures["accuracy_ci"]
        note = f"held out; 95 % interval {low:.1%} to {high:.1%}; chance is 50 %"
        yield Tile("pairs ranked correctly", "", f"{measures['accuracy']:.1%}", note)
    elif "perplexity_after" in measures:
        before, after = (number_text(measures[f"perplexity_{end}"]) for end in ENDS)
        yield Tile("perplexity", before, after, "of held-out text: lower is better")
    tokens = measures.get("response_tokens_after")
    if (kl := measures.get("kl_to_reference")) is not None:
        per_token = f"; {kl / tokens:.2f} per token, doubtful above {MOST_KL}" if tokens else ""
        yield Tile("KL, nats", "", number_text(kl), f"distance from the reference{per_token}")
    if tokens is not None:
        before, after = (number_text(measures[f"response_tokens_{end}"]) for end in ENDS)
        ended = f"; {measures['ended_share_after']:.0%} of the answers ended by themselves"
        yield Tile("tokens of an answer", before, after, f"mean{ended}")
    if "measured" in result:
        hours, plan = result["measured"]["hours"], (result.get("planned") or {}).get("hours")
        note = f"{hours / plan:.1f} times the planned {duration_text(plan)}" if plan else ""
        yield Tile("time", "", duration_text(hours), note)
