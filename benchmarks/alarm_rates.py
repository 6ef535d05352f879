"""How often alarms are right: short runs of healthy and of broken recipes, and what each raised.

    python benchmarks/alarm_rates.py OUT [--only SCENARIO ...] [--jobs 2]

Runs every scenario with every seed below OUT, one run per core, unless its folder has a report
already. Then the rules are applied to the metrics of the runs, and two tables are printed: hits,
false alarms and lead time of every scenario, and hits and false alarms of every alarm. The lead
time is the number of steps between the first right alarm and the first evaluation in which the gold
score has fallen by a tenth from its best. Runs of a seed share their SFT and reward model through
the store of phases.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from common import run_on_cores, table

from rlhf.base.stored_files import METRICS
from rlhf.config.schema.run import AlarmName
from rlhf.run.step_alarms import Alarm, AlarmRules

COMMON = (
    "reward.epochs=0.25",
    "ppo.steps=30",
    "ppo.eval_every=2",
    "ppo.eval_prompts=200",
    "reuse.phases=always",
)  # a scenario's own values go first
SMALL = ("experiment=smoke", "ppo.steps=12", "ppo.rollout_batch_size=32", "ppo.eval_every=0")
RULE = (*SMALL, "phase=pipeline_rule", "model@reward_model=gold")
ALONE = (*RULE, "ppo.missing_end_penalty=0")  # nothing but the rule tells responses apart
FALL = 0.9  # a gold score below this share of its best has fallen by a tenth
LEFT = frozenset(
    {
        AlarmName.kl_runaway,
        AlarmName.clipping,
        AlarmName.entropy_collapse,
        AlarmName.duplicates,
        AlarmName.length,
        AlarmName.few_end,
        AlarmName.score_against_gold,
        AlarmName.not_finite,
    }
)  # what a policy does that leaves its reference


NO_SIGNAL = frozenset(
    {AlarmName.equal_scores, AlarmName.equal_groups, AlarmName.blind_updates}
)  # what equal scores of all responses raise


class Scenario(NamedTuple):
    """A recipe: its overrides, its number of seeds, and the alarms that are right for it."""

    overrides: tuple[str, ...]
    seeds: int
    right: frozenset[AlarmName] | None  # empty: healthy; None: alarms are neither right nor wrong


def _healthy(*overrides: str, seeds: int = 4) -> Scenario:
    return Scenario(overrides, seeds, frozenset())


def _broken(*overrides: str, right: Iterable[AlarmName] = LEFT, seeds: int = 6) -> Scenario:
    return Scenario(overrides, seeds, frozenset(right))


def _function(name: str) -> str:
    """Return the override that takes a function of failing_rewards.py as the only reward."""
    function = f'function: "failing_rewards:{name}", run_code: true, fallback: 0.0'
    return f"rewards.part={{kind: function, {function}}}"


MEMBERS = ("reward.members=5", "reward.member_epochs=0.125")  # half of reward.epochs
SHORT = "rewards.part={kind: length, most: 4, slack: 28}"
STOP = "rewards.part={kind: stop}"
NOTHING = "rewards.part={kind: length, most: 1, slack: 1}"
GRPO, RLOO = (
    (f"ppo.advantage_estimator={name}", "ppo.responses_per_prompt=4") for name in ("grpo", "rloo")
)
# Small models, 12 steps: whether a run has a signal shows in its first steps.
SMALL_SCENARIOS: Mapping[str, Scenario] = {
    "small model": _healthy(*SMALL, seeds=3),
    "PPO on a rule": _healthy(*RULE, SHORT, seeds=3),
    "GRPO on a rule": _healthy(*RULE, SHORT, *GRPO, seeds=3),
    "RLOO on a rule": _healthy(*RULE, SHORT, *RLOO, seeds=3),
    "GRPO on right or wrong": _healthy(*RULE, STOP, *GRPO, seeds=3),
    "reward that fails rarely": _healthy(*RULE, _function("rarely"), seeds=3),
    "reward that fails often": _broken(
        *RULE, _function("often"), right=[AlarmName.fallbacks], seeds=3
    ),
    "reward that always fails": _broken(
        *RULE,
        _function("always"),
        right=[AlarmName.fallbacks, AlarmName.equal_scores],
        seeds=3,
    ),
    "rule that nothing meets": _broken(*ALONE, NOTHING, *RLOO, right=NO_SIGNAL, seeds=3),
    "equal scores for a prompt": _broken(
        *ALONE, _function("by_prompt"), *GRPO, right=[AlarmName.equal_groups], seeds=3
    ),
    "scores beyond the clip": _broken(
        *ALONE, _function("beyond_clip"), right=[AlarmName.blind_updates], seeds=3
    ),
}
SCENARIOS: Mapping[str, Scenario] = {
    "default": _healthy(seeds=18),
    "strong penalty": _healthy("ppo.kl_ctl=0.5", seeds=9),
    "adaptive penalty": _healthy("experiment=adaptive_kl"),
    "advantages not whitened": _healthy("ppo.whiten_advantages=false"),
    "lambda 1": _healthy("ppo.lam=1.0"),
    "one pass": _healthy("ppo.ppo_epochs=1"),
    "GRPO": _healthy("experiment=grpo"),
    "RLOO": _healthy("experiment=rloo"),
    "REINFORCE++": _healthy("experiment=reinforce_pp"),
    "weak penalty": Scenario(("ppo.kl_ctl=0.02",), 9, None),
    "over-optimised": _broken(
        "experiment=overoptimised",
        "reward.epochs=0.03",
        "ppo.steps=40",
        right=[AlarmName.score_against_gold, AlarmName.kl_runaway],
    ),
    "no penalty": _broken("ppo.kl_ctl=0"),
    "reward model that guesses": _broken("reward.lr=1e-9", "ppo.kl_ctl=0.02"),
    "actor learning rate too high": _broken("ppo.actor_lr=1e-2"),
    "actor learning rate too low": _broken(
        "ppo.actor_lr=1e-9", right=[AlarmName.no_change], seeds=4
    ),
    "critic learning rate too high": _broken("ppo.critic_lr=0.1", right=[AlarmName.critic_useless]),
    "entropy bonus too large": _broken("ppo.entropy_coef=1.0"),
    "five reward models": _healthy(*MEMBERS),
    "five reward models over-optimised": _broken(
        *MEMBERS,
        "experiment=overoptimised",
        "reward.epochs=0.03",
        "reward.member_epochs=0.03",
        "ppo.steps=40",
        right=[AlarmName.score_against_gold],
        seeds=4,
    ),
    "five reward models without penalty": _broken(*MEMBERS, "ppo.kl_ctl=0", right=LEFT, seeds=4),
    **SMALL_SCENARIOS,
}


class Outcome(NamedTuple):
    """What one run raised, and the step at which its gold score had fallen by a tenth."""

    alarms: list[Alarm]
    fell_at: int | None

    def first(self, right: Iterable[AlarmName]) -> int | None:
        """Return the step of the first alarm that is among ``right``."""
        return min((alarm.step for alarm in self.alarms if alarm.name in right), default=None)


def run_all(out: Path, names: Sequence[str], *, jobs: int) -> None:
    """Run every seed of the scenarios ``names`` that has no report yet, one per core."""
    runs = {
        out / name.replace(" ", "_") / str(seed): [
            # A rule has no reward phase, and launch.py refuses keys that no phase reads.
            *COMMON["phase=pipeline_rule" in SCENARIOS[name].overrides :],
            *SCENARIOS[name].overrides,
            f"seed={seed}",
        ]
        for name in names
        for seed in range(1, SCENARIOS[name].seeds + 1)
    }
    run_on_cores(runs, at_a_time=jobs)


def outcome(run_dir: Path) -> Outcome:
    """Apply the rules to the metrics of a run."""
    rules, alarms = AlarmRules(), []
    best, fell_at = 0.0, None
    for line in METRICS.read_lines(run_dir):
        phase, step = line.pop("phase"), line.pop("step")
        values = {name: math.nan if value is None else value for name, value in line.items()}
        alarms += rules.check(phase, step, values)
        gold = line.get("ppo/eval_gold")
        if gold is None:
            continue
        best = max(best, gold)
        if fell_at is None and gold < FALL * best:
            fell_at = step
    return Outcome(alarms, fell_at)


def scenario_row(name: str, outcomes: Sequence[Outcome]) -> list[str | None]:
    """Return the row of a scenario: hits, median step and lead time, and what was raised."""
    right = SCENARIOS[name].right
    raised = [alarm.name for each in outcomes for alarm in each.alarms]
    counts = ", ".join(f"`{alarm}` {raised.count(alarm)}" for alarm in dict.fromkeys(raised))
    if not right:
        false = sum(bool(each.alarms) for each in outcomes) if right is not None else None
        told = None if false is None else f"{false} of {len(outcomes)}"
        return [name, str(len(outcomes)), None, told, None, None, counts or None]
    steps = [step for each in outcomes if (step := each.first(right)) is not None]
    leads = [
        each.fell_at - step
        for each in outcomes
        if each.fell_at is not None and (step := each.first(right)) is not None
    ]
    return [
        name,
        str(len(outcomes)),
        f"{len(steps)} of {len(outcomes)}",
        None,
        f"{statistics.median(steps):g}" if steps else None,
        f"{statistics.median(leads):g} ({min(leads)} to {max(leads)})" if leads else None,
        counts or None,
    ]


def alarm_row(name: AlarmName, found: Mapping[str, Sequence[Outcome]]) -> list[str | None]:
    """Return the row of an alarm: in how many runs it was right, and in how many wrong."""
    cells: list[str | None] = [f"`{name}`"]
    for is_healthy in (False, True):
        of = [
            each
            for scenario, outcomes in found.items()
            if (right := SCENARIOS[scenario].right) is not None
            and (not right if is_healthy else name in right)
            for each in outcomes
        ]
        raised = sum(each.first([name]) is not None for each in of)
        cells.append(f"{raised} of {len(of)}" if of else None)
    return cells


def main() -> None:
    """Run the scenarios and print the tables."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("out", type=Path)
    options.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    options.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    given = options.parse_args()
    out = given.out.resolve()
    run_all(out, given.only, jobs=given.jobs)
    found = {
        name: [outcome(folder) for folder in sorted((out / name.replace(" ", "_")).iterdir())]
        for name in given.only
    }
    header = ["scenario", "runs", "hits", "false alarms", "step", "lead time", "raised"]
    sys.stdout.write(table(header, (scenario_row(*each) for each in found.items())) + "\n\n")
    header = ["alarm", "raised where it is right", "raised in healthy runs"]
    sys.stdout.write(table(header, (alarm_row(name, found) for name in AlarmName)) + "\n")
    runs = {
        name: [[list(alarm[1:3]) for alarm in each.alarms] for each in outcomes]
        for name, outcomes in found.items()
    }
    (out / "alarms.json").write_text(json.dumps(runs) + "\n")


if __name__ == "__main__":
    main()
