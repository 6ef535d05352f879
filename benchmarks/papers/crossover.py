"""Which estimator learns fastest: by horizon, density and noise of the reward, and group size.

``benchmarks/crossover.md`` has the map; ``crossover_page`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from papers import chains
from papers.claims import Figures, Outcome, PaperResult, Place, Verdict
from papers.paired import number, told
from papers.started_runs import run_of
from rlhf.base.intervals import mean_with_interval

STEPS = 32
FIRST = 8  # steps of them in which only the critic learns
LONGEST = 32


class Task(NamedTuple):
    """A task of the map: letters to count, and what the reward sees of them."""

    horizon: int
    density: str  # share, or whole
    is_noisy: bool

    @property
    def title(self) -> str:
        """Return the words by which figures are stored."""
        return f"{self.horizon} {self.density}" + (" noisy" if self.is_noisy else "")

    @property
    def wrong(self) -> float:
        """Return the share of wrong letters in demonstrations."""
        if self.density == "share":
            return chains.SHARE_WRONG
        return 1 - chains.WHOLE_RIGHT ** (1 / self.horizon)


TASKS = tuple(
    Task(horizon, density, is_noisy)
    for horizon in (1, 8, LONGEST)
    for density in (("share",) if horizon == 1 else ("share", "whole"))
    for is_noisy in (False, True)
)
CRITIC_FIRST = "PPO, critic first"
SAMPLED = "sampled values"
WITHOUT_CRITIC = {
    "RLOO 4": ("ppo.advantage_estimator=rloo", "ppo.responses_per_prompt=4"),
    "GRPO 4": ("ppo.advantage_estimator=grpo", "ppo.responses_per_prompt=4"),
    "GRPO 16": ("ppo.advantage_estimator=grpo", "ppo.responses_per_prompt=16"),
    "REINFORCE++": ("ppo.advantage_estimator=reinforce_pp",),
}
SETTINGS = (
    "phase=pipeline_rule",
    "model@reward_model=gold",
    "model.vocab_size=265",  # bytes: each letter is a token
    "data=local",
    "data.split=[8,0,4]",
    "sft.epochs=3",
    f"ppo.steps={STEPS}",
    "ppo.rollout_batch_size=64",
    "ppo.mini_batch_size=32",
    "ppo.kl_ctl=0",
    "ppo.clip_reward_value=null",
    "ppo.missing_end_penalty=0",
    "ppo.eval_every=8",
    "ppo.eval_prompts=128",
)


def arms_of(task: Task, *, first: int) -> dict[str, tuple[str, ...]]:
    """Return the overrides of each arm; sampled values need states in the middle of responses."""
    ppo = ("ppo.lam=0.95",)
    critic_first = (*ppo, "ppo.lam_critic=1", f"ppo.actor_freeze_steps={first}")
    arms = {"PPO": ppo, CRITIC_FIRST: critic_first, **WITHOUT_CRITIC}
    if task.horizon == 1:
        return arms
    sampled = ("ppo.value_targets=monte_carlo", "ppo.value_branches=4")
    return arms | {SAMPLED: (*sampled, f"ppo.value_step_tokens={task.horizon // 4}")}


def measure(seed: int, place: Place) -> Figures:
    """Return the mean true score over the evaluations of each arm on each task."""
    found: Figures = {}
    for task in TASKS[:2] if place.is_quick else TASKS:
        path = place.shared / "chains" / f"{task.horizon}-{task.density}.jsonl"
        if not path.exists():
            chains.write_rows(path, horizon=task.horizon, wrong=task.wrong)
        reward = ("noisy_" if task.is_noisy else "") + task.density
        words = (
            *SETTINGS,
            f"data.path={path}",
            f"rollout.max_response_tokens={task.horizon + 4}",
            function_reward("learned", f"papers.chains:{reward}", weight=1),
            function_reward("true", f"papers.chains:{task.density}", weight=0),
        )
        for arm, more in arms_of(task, first=2 if place.is_quick else FIRST).items():
            curve = true_scores(run_of(place, *words, *more, seed=seed))
            found[f"before, {task.title}"] = curve[0]
            found[f"{task.title}: {arm}"] = fmean(curve[1:])
            found[f"after, {task.title}: {arm}"] = curve[-1]
    return found


def function_reward(name: str, function: str, *, weight: int) -> str:
    """Return the override that rewards with a function MODULE:NAME."""
    words = f'kind: function, function: "{function}", run_code: true'
    return f"rewards.{name}={{{words}, weight: {weight}}}"


def true_scores(run_dir: Path) -> list[float]:
    """Return the true score on held-out prompts before PPO, and at each evaluation."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if (key := "ppo/eval_parts/true") in line]


def judge(found: Mapping[int, Figures]) -> Verdict:
    """Compare PPO whose critic learns first with each arm without a critic, at 32 decisions."""
    longest = [task for task in TASKS if task.horizon == LONGEST]
    gains = {
        arm: mean_with_interval(
            [
                fmean(
                    number(figures, f"{task.title}: {CRITIC_FIRST}")
                    - number(figures, f"{task.title}: {arm}")
                    for task in longest
                    if f"{task.title}: {arm}" in figures
                )
                for figures in found.values()
            ]
        )
        for arm in WITHOUT_CRITIC
        if all(f"{longest[0].title}: {arm}" in figures for figures in found.values())
    }
    if not gains:
        return Verdict(Outcome.OPEN, "the long tasks were not run")
    words = f"at {LONGEST} decisions PPO whose critic learns first, minus "
    words += ", ".join(f"{arm} {told(gain)}" for arm, gain in gains.items())
    if all(gain.low > 0 for gain in gains.values()):
        return Verdict(Outcome.PASSED, words)
    is_below = any(gain.high < 0 for gain in gains.values())
    return Verdict(Outcome.FAILED if is_below else Outcome.OPEN, words)


RESULT = PaperResult(
    title="PPO or GRPO on long horizons",
    source="https://arxiv.org/abs/2511.03527",
    claim="Learned critics remain essential for long horizons: without one, every baseline is "
    "worse than PPO, except where episodes are short.",
    criterion=f"Counting letters with {STEPS} steps of 64 responses, {LONGEST} decisions each, "
    "rewarded for the share of right letters or for whole right answers, with and without noise. "
    f"PPO whose critic learns alone in the first {FIRST} of these steps, minus RLOO and GRPO with "
    "groups of 4, GRPO with groups of 16 and REINFORCE++: the true held-out score, mean over the "
    "evaluations and the four tasks, paired by seed. Passed: each of the four intervals lies above "
    "0. Failed: one lies below 0.",
    note="[The map](crossover.md) has all tasks. Resting the actor for a quarter of so few steps "
    "costs more than the critic returns. PPO that does not rest cannot be told from any of the "
    "four: against REINFORCE++ -0.022 (-0.078 to +0.034).",
    seeds=(1, 2, 3, 4, 5),
    minutes=45,
    measure=measure,
    judge=judge,
)
