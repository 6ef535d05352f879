"""Print the summary at the end of a run: results, files, and commands to continue with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.base.safe_text import strip_control_characters
from rlhf.base.stored_files import METRICS, SAMPLES
from rlhf.base.user_paths import relative_to_cwd
from rlhf.report.alarms import read_doubts
from rlhf.report.next_commands import suggest_commands
from rlhf.run.policies import DERIVED, DERIVED_MODELS, POLICIES
from rlhf.run.step_alarms import Alarm, describe_divergence, read_alarms

if TYPE_CHECKING:
    from rich.table import Table

    from rlhf.run.console import Console

# Label in the summary -> file or folder in the run directory, which not every run has.
ARTIFACTS: Mapping[str, str] = {
    POLICIES[0].label: POLICIES[0].folder,
    "reward model": "reward/model",
    **{policy.label: policy.folder for policy in POLICIES[1:]},
    "critic": "ppo/critic",
    "metrics": METRICS.name,
    "samples": SAMPLES.name,
}

AnswersToPrompt = tuple[Mapping[str, Any], Mapping[str, Any]]  # the first and the last sample


class ChangedAnswers(NamedTuple):
    """First and last answers to the same prompts, and a text with how many scores rose or fell."""

    pairs: Sequence[AnswersToPrompt]
    counts_text: str


class SummaryRow(NamedTuple):
    """A measure and its values before and after a phase; "" stands for a missing value."""

    measure: str
    before: str = ""
    after: str = ""


class SummaryBlock(NamedTuple):
    """The measures and the duration of a phase, or of the whole run."""

    name: str
    rows: list[SummaryRow]
    duration: str


def print_summary(console: Console, result: Mapping[str, Any], run_dir: Path, verdict: str) -> None:
    """Print the summary of a run from ``result``, in the form of result.json.

    The verdict, the doubts and what to type come last: the end of the output is what a user sees.
    """
    alarms = read_alarms(run_dir)
    console.say("")
    console.show(summary_table(result, summary_title(result, alarms)))
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    doubts = [doubt.line for doubt in read_doubts(run_dir)]
    sections = (
        [versions] if versions else [],  # a run that an alarm stopped has no versions
        replaced_kernel_lines(result),
        answers_side_by_side(run_dir),
        list_files_of_run(run_dir),
        [verdict],
        ["Reasons to doubt this run", *(f"  {line}" for line in doubts)] if doubts else [],
        suggest_commands(run_dir),
    )
    for section in sections:
        for line in ("", *section) if section else ():
            console.say(line)


def replaced_kernel_lines(result: Mapping[str, Any]) -> list[str]:
    """Return a line for each kernel that a phase of the run replaced by torch operations."""
    by_phase = (measures.get("replaced_kernels", ()) for measures in result["phases"].values())
    return list(dict.fromkeys(line for lines in by_phase for line in lines))


def summary_title(result: Mapping[str, Any], alarms: Sequence[Alarm]) -> str:
    """Return a title: the run's objective or, if the run diverged, its first step with a NaN."""
    if (diverged := describe_divergence(alarms)) is not None:
        return diverged
    return f"objective {_number_text(result['objective'])}: {describe_objective(result['phases'])}"


def summary_table(result: Mapping[str, Any], title: str) -> Table:
    """Return a table of each phase's measures, before and after it, and those of the whole run."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("phase", style="bold")
    table.add_column("measure")
    for column in ("before", "after", "time"):
        table.add_column(column, justify="right")
    for block in summary_blocks(result):
        outer_cells = iter((block.name, block.duration))  # only the block's first row has them
        for row in block.rows:
            table.add_row(next(outer_cells, ""), *row, next(outer_cells, ""))
        table.add_section()
    return table


def summary_blocks(result: Mapping[str, Any]) -> Iterator[SummaryBlock]:
    """Yield the measures of each phase that has a result, then those of the whole run."""
    for phase, rows in PHASE_ROWS.items():
        if phase in result["phases"]:
            measures = result["phases"][phase]
            has_trained = "reused_from" not in measures
            duration = duration_text(measures["seconds"] / 3600) if has_trained else "reused"
            yield SummaryBlock(phase, list(rows(measures)), duration)
    if "measured" in result:
        run_rows = list(_run_rows(result["measured"], result.get("planned") or {}))
        yield SummaryBlock("run", run_rows, duration_text(result["measured"]["hours"]))


def describe_objective(phases: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what the objective measures, which runtime/phase_runs.py takes from the last phase."""
    last = next((name for name in reversed([*PHASE_ROWS]) if name in phases), None)
    if last is None:  # no run writes a result without phases
        return "of no phase"
    if "gold_after" in phases[last]:
        return f"held-out gold score after {last.upper()}"
    names = {
        "sft": "minus the held-out perplexity after SFT",
        "reward": "held-out accuracy of the reward model",
        "ppo": "held-out score after PPO, by the reward that trained it",
        "dpo": "held-out accuracy of DPO's implicit reward",
    }
    return names[last]


def answers_side_by_side(run_dir: Path) -> list[str]:
    """Return lines with the first and the last answers to the 3 prompts that changed most."""
    changed = find_changed_answers([*SAMPLES.read_lines(run_dir)])
    if not changed.pairs:
        return []
    lines = [f"Answers before and after training (samples.jsonl): {changed.counts_text}"]
    for first, last in changed.pairs[:3]:
        lines.append(f"  {_one_line(last['prompt'])}")
        for when, answer in (("before", first), ("after", last)):
            note = "" if answer["ended"] else " (never ended)"
            lines.append(f"    {when:<7}{_one_line(answer['response'])}{note}")
    return lines


def find_changed_answers(samples: Sequence[Mapping[str, Any]]) -> ChangedAnswers:
    """Pair the first and last answers to each prompt; no pairs if there was only one evaluation."""
    of_policy = [sample for sample in samples if sample.get("model") not in DERIVED_MODELS]
    first, last = (
        {row["prompt"]: row for row in of_policy if row["step"] == of_policy[end]["step"]}
        for end in (0, -1)
    )
    pairs = [(first[prompt], answer) for prompt, answer in last.items() if prompt in first]
    return rank_by_change([pair for pair in pairs if pair[0]["step"] != pair[1]["step"]])


def rank_by_change(pairs: Sequence[AnswersToPrompt]) -> ChangedAnswers:
    """Return the pairs, the largest change of score first, and counts of rises and falls.

    The gold scores are compared or, if any answer has no gold score, the scores.
    """
    golds = [answer.get("gold") for pair in pairs for answer in pair]
    key = "score" if None in golds else "gold"
    scores: Iterator[Any] = (tuple(answer.get(key) for answer in pair) for pair in pairs)
    changes = [0.0 if None in (first, last) else last - first for first, last in scores]
    higher, lower = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    same = len(pairs) - higher - lower
    is_same = [first["response"] == last["response"] for first, last in pairs]
    ranked = sorted(range(len(pairs)), key=lambda index: (-abs(changes[index]), is_same[index]))
    counts_text = f"by {key}, {higher} higher, {lower} lower, {same} the same"
    return ChangedAnswers([pairs[index] for index in ranked], counts_text)


def _one_line(text: str) -> str:
    """Return ``text`` in one line, without characters that control a terminal."""
    return strip_control_characters(" ".join(text.split()))


def _run_rows(
    measured: Mapping[str, float], planned: Mapping[str, float | None]
) -> Iterator[SummaryRow]:
    """Yield rows for the run's time and memory, with the planned values if there is a plan."""
    yield SummaryRow("time")
    if (hours := planned.get("hours")) is not None:
        yield SummaryRow("  planned", after=duration_text(hours))
    if "memory_gib" in measured:  # missing if every phase is reused from another run
        yield SummaryRow("peak memory, GiB", after=_number_text(measured["memory_gib"]))
        if (gib := planned.get("memory_gib")) is not None:
            yield SummaryRow("  planned", after=_number_text(gib))


def list_files_of_run(run_dir: Path) -> list[str]:
    """Return a title, and a line for each file or folder of ``ARTIFACTS`` that the run has."""
    lines = [
        f"  {name:<16} {relative_to_cwd(run_dir / path)}"
        for name, path in ARTIFACTS.items()
        if (run_dir / path).exists()
    ]
    return ["Files of this run", *lines]


def _reward_rows(reward: Mapping[str, Any]) -> Iterator[SummaryRow]:
    yield from _accuracy_rows(reward)
    if "best_possible_accuracy" in reward:
        yield SummaryRow("  best possible", after=_number_text(reward["best_possible_accuracy"]))
    for flaw, share in reward.get("minimal_pairs", {}).items():
        yield SummaryRow(f"  {flaw.replace('_', ' ')}", after=_number_text(share))


def _accuracy_rows(measures: Mapping[str, Any]) -> Iterator[SummaryRow]:
    low, high = measures["accuracy_ci"]
    # Single responses are ranked against all others; those of a pair only against each other.
    label = "held-out ranking" if "responses" in measures else "held-out accuracy"
    yield SummaryRow(label, after=_number_text(measures["accuracy"]))
    yield SummaryRow("  95 % interval", after=_interval_text(low, high, "{:.3f}-{:.3f}"))


def _ppo_rows(ppo: Mapping[str, Any]) -> Iterator[SummaryRow]:
    yield from _policy_rows(ppo)
    yield _before_after_row("held-out score", ppo, "score")
    yield from _gain_rows(ppo, "score")
    yield from _reward_part_rows(ppo, "score")
    for label, key in RETURNS_TO_COMPARE.items():
        if key in ppo:
            yield SummaryRow(f"  {label}", after=_number_text(ppo[key]))


RETURNS_TO_COMPARE = {"optimal return": "optimum", "random turns' return": "random_return"}
POLICY_ROWS: dict[str, str] = {  # label -> KEY, for the results KEY_before and KEY_after of a phase
    "exactly right": "exact",
    "exactly right, greedy": "exact_greedy",
    "held-out gold score": "gold",
    "return of an episode": "return",
    "share of successes": "success",
    "turns of an episode": "turns",
    "response tokens": "response_tokens",
    "share that ended": "ended_share",
    "corpus perplexity": "corpus_perplexity",
}


def _policy_rows(measures: Mapping[str, Any]) -> Iterator[SummaryRow]:
    for label, key in POLICY_ROWS.items():
        if f"{key}_before" in measures:
            yield _before_after_row(label, measures, key)
        yield from _gain_rows(measures, key)
        for policy in DERIVED:
            if (measure := f"{key}_after_{policy.suffix}") in measures:
                yield SummaryRow(f"  {policy.label}", after=_number_text(measures[measure]))
        yield from _reward_part_rows(measures, key)
    kl = measures["kl_to_reference"]
    by_chance = " (an estimate, below 0 by chance)" if kl < 0 else ""
    yield SummaryRow(f"KL to reference, nats{by_chance}", after=_number_text(kl))


def _before_after_row(label: str, measures: Mapping[str, Any], key: str) -> SummaryRow:
    before, after = measures[f"{key}_before"], measures[f"{key}_after"]
    return SummaryRow(label, _number_text(before), _number_text(after))


def _reward_part_rows(measures: Mapping[str, Any], key: str) -> Iterator[SummaryRow]:
    for part, before in measures.get(f"{key}_parts_before", {}).items():
        after = measures[f"{key}_parts_after"][part]
        yield SummaryRow(f"  {part}", _number_text(before), _number_text(after))
        if key == "score" and part in (judges := measures.get("judge_gains", {})):
            yield from _gain_rows({f"{part}_gain_ci": judges[part]}, part)


def _gain_rows(measures: Mapping[str, Any], key: str) -> Iterator[SummaryRow]:
    if f"{key}_gain_ci" in measures:
        low, high = measures[f"{key}_gain_ci"]
        yield SummaryRow("  gain, 95 % interval", after=_interval_text(low, high))


PHASE_ROWS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[SummaryRow]]] = {
    "sft": lambda sft: iter([_before_after_row("held-out perplexity", sft, "perplexity")]),
    "reward": _reward_rows,
    "ppo": _ppo_rows,
    "dpo": lambda dpo: chain(_accuracy_rows(dpo), _policy_rows(dpo)),
}


def duration_text(hours: float) -> str:
    """Return a number of hours as H:MM:SS, after "N days, " if it is a day or more."""
    longest = timedelta.max.days * 24  # timedelta cannot hold the hours of some damaged files
    return str(timedelta(hours=max(0, min(hours, longest)))).partition(".")[0]


def _number_text(value: float) -> str:
    return f"{value:,.3f}" if math.isfinite(value) else "not finite"


def _interval_text(low: float, high: float, form: str = "{:+.3f} to {:+.3f}") -> str:
    return form.format(low, high) if math.isfinite(high - low) else "not finite"
