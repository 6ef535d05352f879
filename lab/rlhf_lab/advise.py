"""Probe a configuration for a few steps, and name the advantage estimator that suits its task.

    python -m rlhf_lab.advise [KEY=VALUE ...]

KEY=VALUE are overrides of launch.py. The probe is a run of this configuration in which the actor is
frozen, the critic learns, and each prompt gets four responses. The advice is the estimator whose
gradient has the least noise. docs/algorithms.md reports how often the advice was right.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.command import Result, build_command_parser, run_to_exit_code, wait_for_exit
from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.program import LAUNCHER
from rlhf.base.stored_files import LINE, METRICS, read_json_lines
from rlhf.config.choices import AdvantageEstimator
from rlhf.options.rollout_log.keys import LOG as ROLLOUTS
from rlhf.run.console import Console

STEPS, GROUP = 8, 4  # of the probe: default of --steps, responses to a prompt
GROUPS = (4, 8, 16, 32)  # numbers of responses to a prompt that may be advised
CRITIC_GAIN = 0.8  # a critic costs memory: advise it below this share of the lowest other noise
LEARNED_SHARE = 0.9  # share of its final explained variance at which a critic has warmed up

PROBE = {  # overrides that make a run a probe
    "ppo.advantage_estimator": "gae",
    "ppo.responses_per_prompt": GROUP,
    "ppo.lam_critic": 1,
    "ppo.log_rollouts_every": 1,
    "ppo.eval_every": 0,
    "ppo.eval_prompts": 2,
    "reuse.phases": "always",
    "ppo.epochs": "null",
    "ppo.resampling_rounds": 0,  # this key and gdpo need an estimator that compares responses
    "ppo.gdpo": False,
    "ppo.shared_trunk": False,  # the critic of a shared trunk cannot learn without the actor
    "checkpoint.stop_after": "null",
}
TRUNK_KEYS = ("ppo.num_layers_unfrozen=", "ppo.num_value_layers=")  # refused without a trunk
EXPLAINED = "ppo/explained_variance"


class Probe(NamedTuple):
    """Measures of a task, from rollouts of a frozen actor."""

    batch: int
    """Number of responses per step."""
    responses: int
    score_mean: float
    score_deviation: float
    within: float
    """Share of the variance of scores that lies between responses to the same prompt."""
    equal_groups: float
    """Share of prompts whose responses all have the same score."""
    tokens: float
    """Mean length of a response."""
    explained: Sequence[float]
    """Share of the variance of returns that the critic explains, in the rollouts after 0, 1, ...
    steps of learning."""

    @classmethod
    def of(cls, rollouts: Iterable[Mapping[str, Any]], explained: Sequence[float]) -> Probe:
        """Measure logged responses; ``explained`` becomes the field of this name.

        Raises:
            CheckpointError: if no prompt has several responses.
            ConfigError: if all scores are equal.
        """
        groups: dict[tuple[int, str], list[float]] = defaultdict(list)
        tokens = []
        for line in rollouts:
            groups[line["step"], line["prompt"]].append(line["score"])
            tokens.append(line["tokens"])
        compared = [scores for scores in groups.values() if len(scores) > 1]
        if not compared:
            raise CheckpointError(
                f"{ROLLOUTS}: no prompt has two responses, so none are compared; remove keys that "
                "end the probe early, such as plan=only"
            )
        scores = [score for group in groups.values() for score in group]
        if not (variance := statistics.variance(scores)):
            raise ConfigError(
                f"rewards: all {len(scores)} responses have the score {scores[0]:g}, from which no "
                "estimator can learn; use another reward, or a policy that sometimes succeeds"
            )
        return cls(
            batch=len(scores) // len({step for step, _ in groups}),
            responses=len(scores),
            score_mean=statistics.fmean(scores),
            score_deviation=variance**0.5,
            within=statistics.fmean(map(statistics.variance, compared)) / variance,
            equal_groups=statistics.fmean(len(set(group)) == 1 for group in compared),
            tokens=statistics.fmean(tokens),
            explained=explained,
        )

    @property
    def group(self) -> int:
        """Return the number of responses to a prompt whose comparison has the least noise."""
        sizes = [k for k in GROUPS if self.batch % k == 0]
        return min(sizes, key=lambda k: self._noise(k / (k - 1), group=k))

    @property
    def noises(self) -> dict[AdvantageEstimator, float]:
        """Return the noise of each estimator's gradient, relative to the variance of scores.

        The noise is the variance of score minus baseline. The baseline is the mean of the batch
        (reinforce_pp), the mean of the k - 1 other responses to the prompt, with an added error of
        1 / (k - 1) (rloo), or the critic's value with lambda 1 (gae). Fewer prompts: more noise.
        """
        compared = self.within * self.group / (self.group - 1)
        critic = 1 - statistics.fmean(self.explained[-2:])
        return {
            AdvantageEstimator.reinforce_pp: self._noise(1.0, group=1),
            AdvantageEstimator.rloo: self._noise(compared, group=self.group),
            AdvantageEstimator.gae: self._noise(critic, group=1),
        }

    def _noise(self, variance: float, *, group: int) -> float:
        return variance * (1 + group / self.batch)

    @property
    def estimator(self) -> AdvantageEstimator:
        """Return the estimator with the least noise; GAE needs a clear lead (``CRITIC_GAIN``)."""
        noises = self.noises
        critic = noises.pop(AdvantageEstimator.gae)
        best = min(noises, key=noises.__getitem__)
        return AdvantageEstimator.gae if critic < CRITIC_GAIN * noises[best] else best

    @property
    def overrides(self) -> dict[str, str | int]:
        """Return the advised values of keys."""
        compares = self.estimator is AdvantageEstimator.rloo
        advised: dict[str, str | int] = {
            "ppo.advantage_estimator": str(self.estimator),
            "ppo.responses_per_prompt": self.group if compares else 1,
        }
        if self.estimator is AdvantageEstimator.gae:
            advised["ppo.actor_freeze_steps"] = self.warm_up
        return advised

    @property
    def warm_up(self) -> int:
        """Return after how many steps the critic explained nearly as much as at the end."""
        enough = LEARNED_SHARE * max(self.explained[-1], 0.0)
        return next(step for step, share in enumerate(self.explained) if share >= enough)


def main(arguments: Sequence[str]) -> int:
    """Probe the configuration that the command names, print the advice; return the exit code."""
    parser = build_command_parser("rlhf_lab.advise", __doc__, has_json=True)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps with a frozen actor")
    options = parser.parse_intermixed_args(arguments)
    if options.steps < 2:  # noqa: PLR2004
        parser.error(f"--steps {options.steps}: must be 2 or more")
    return run_to_exit_code(lambda: _advise(options), as_json=options.json)


def _advise(options: argparse.Namespace) -> Result:
    probing = PROBE | {"ppo.steps": options.steps + 1, "ppo.actor_freeze_steps": options.steps}
    with tempfile.TemporaryDirectory(prefix=".advise-", dir=Path.cwd()) as folder:
        run_dir = Path(folder) / "run"
        overrides = (f"{key}={value}" for key, value in (probing | {"run_dir": run_dir}).items())
        accepted = [word for word in options.words if not word.startswith(TRUNK_KEYS)]
        command = [sys.executable, str(LAUNCHER), *accepted, *overrides]
        if code := wait_for_exit(subprocess.Popen(command)):
            raise CheckpointError(f"the probe ended with exit code {code}; launch.py printed why")
        metrics = METRICS.read_lines(run_dir)
        explained = [line[EXPLAINED] for line in metrics if EXPLAINED in line]
        probe = Probe.of(read_json_lines(run_dir / ROLLOUTS, LINE), explained)
    if not options.json:
        words = " ".join(f"{key}={value}" for key, value in probe.overrides.items())
        noises = ", ".join(f"{name} {noise:.2f}" for name, noise in probe.noises.items())
        Console().say(
            f"{probe.responses} responses of the frozen policy: score {probe.score_mean:.3f} "
            f"± {probe.score_deviation:.3f}, {probe.tokens:.1f} tokens\n"
            f"{probe.within:.0%} of the variance of scores lies between responses to the same "
            f"prompt; {probe.equal_groups:.0%} of groups of {GROUP} have equal scores\n"
            f"the critic explains {probe.explained[-1]:.0%} of the variance of returns after "
            f"{options.steps} steps\n"
            f"noise of the gradient, relative to the variance of scores: {noises}\n"
            f"advice: {words}"
        )
    return Result({"probe": probe._asdict(), "noises": probe.noises, "overrides": probe.overrides})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
