"""Print the bias and the noise of a configuration's gradient, before a run.

    python -m rlhf_lab.gradients [KEY=VALUE ...]
    python -m rlhf_lab.gradients --own MODULE:NAME [KEY=VALUE ...]

The expected gradient of the configuration's loss, with its estimators, clips and options, is
compared with the exact gradient of E[score] - ppo.kl_ctl * KL(policy || reference), on a random
task of a few short responses whose critic is exact. ppo.teacher_prompt_column, ppo.ptx_coef and
ppo.resampling_rounds are ignored. NAME is your own code: a subclass of PpoHook, or a surrogate,
which is a function like the functions in SURROGATES. The exit code is 1 if a gradient points the
wrong way, and no key of the configuration explains it.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from rlhf.base.command import Result, build_command_parser, quieten_libraries, run_to_exit_code
from rlhf.base.errors import ConfigError, refuse_broken_rule
from rlhf.base.isolated_process import import_user_object
from rlhf.base.program import CONF
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.jobs.completion import build_new_config
from rlhf.jobs.launch_command import compose_job
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.run.console import Console
from rlhf_lab.clip_cov import ClipCovKeys
from rlhf_lab.gdpo import GdpoKeys
from rlhf_lab.gradients.causes import WORDS, Direction, GradientMatch, examine, policies_of_updates
from rlhf_lab.gradients.expected import PROMPTS, GradientEstimator, TinyStep, TinyTask

WRONG_WAY = 1  # exit code if a gradient points the wrong way and no key explains it


class SampledMatch(NamedTuple):
    """The noise and bias of gradients of sampled mini-batches, at the run's batch sizes."""

    batches: int
    noise: float
    """Standard deviation of a mini-batch's gradient, as a share of the expected gradient's norm."""
    bias: float
    """Bias of the mean over the batches."""
    bias_of_noise: float
    """Approximate bias that this many batches show by chance alone."""


def main(arguments: Sequence[str]) -> int:
    """Examine the gradient of the configuration that the command names; return the exit code."""
    parser = build_command_parser("rlhf_lab.gradients", __doc__, has_json=True)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--own", action="append", default=[], metavar="MODULE:NAME")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random task")
    parser.add_argument("--batches", type=int, default=200, help="mini-batches to sample")
    options = parser.parse_intermixed_args(arguments)
    if options.batches < 2:  # noqa: PLR2004
        parser.error(f"--batches {options.batches}: must be 2 or more")
    if not 0 <= options.seed < 2**63:
        parser.error(f"--seed {options.seed}: must be 0 or more, and below 2**63")
    return run_to_exit_code(lambda: _examine(options), as_json=options.json)


def build_estimator(config: RunConfig, own: Sequence[object] = ()) -> GradientEstimator:
    """Return the gradient estimator of ``config``, with the user's hook and surrogate in ``own``.

    Raises:
        ConfigError: if there is no PPO, an option cannot be examined (an environment, GDPO,
            Clip-Cov), or an object of ``own`` is neither a PpoHook class nor a surrogate.
    """
    if Phase.ppo not in config.phase.order:
        raise ConfigError("phase.order has no ppo: only PPO's gradient is examined; use phase=ppo")
    ratio = ClipCovKeys.of(config).clip_cov_ratio
    broken = {
        f"environment.kind={config.environment.kind}: the task has no turns; use "
        "environment=none for this command": config.environment.is_used,
        "ppo.gdpo=true: the task has one reward, so none are normalised and added; use "
        "ppo.gdpo=false for this command": GdpoKeys.of(config).gdpo,
        f"ppo.clip_cov_ratio={ratio}: draws tokens at random, and one draw is not an expectation; "
        "use ppo.clip_cov_ratio=0 for this command": ratio > 0,
    }
    refuse_broken_rule(broken)
    estimator = GradientEstimator(replace(config, ppo=replace(config.ppo, ptx_coef=0.0)))
    for code in own:
        if inspect.isclass(code) and issubclass(code, PpoHook):
            estimator = replace(estimator, hook=code)
        elif callable(code) and not inspect.isclass(code):
            estimator = replace(estimator, surrogate=code)
        else:
            raise ConfigError(f"--own {code!r}: must be a subclass of PpoHook, or a surrogate")
    return estimator


def sample(method: GradientEstimator, task: TinyTask, *, batches: int, seed: int) -> SampledMatch:
    """Sample ``batches`` mini-batches of the first update; return their noise and bias."""
    step = TinyStep(method, task, policies_of_updates(method, task)["first"])
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.stack([step.sampled_gradient(generator).flatten() for _ in range(batches)])
    noise = float(gradients.var(dim=0).sum().sqrt() / step.expected_gradient().norm())
    bias = GradientMatch.of(gradients.mean(dim=0), step.exact_gradient().flatten()).bias
    return SampledMatch(batches, noise, bias, noise / batches**0.5)


def _examine(options: argparse.Namespace) -> Result:
    quieten_libraries()
    with compose_job(options.words, CONF) as job:
        config = build_new_config(job)
    method = build_estimator(config, [import_user_object("--own", name)[0] for name in options.own])
    task, ppo = TinyTask.draw(options.seed, method.group), method.config.ppo
    finding = examine(method, task)
    sampled = sample(method, task, batches=options.batches, seed=options.seed)
    num_answers = len(task.answers.keep_AT)
    content = {
        "task": {"seed": options.seed, "prompts": PROMPTS, "answers": num_answers},
        "gradients": [
            {"update": update, "part": part, **match._asdict()}
            for update, parts in finding.compared.items()
            for part, match in parts.items()
        ],
        "sampled": {**sampled._asdict(), "responses": ppo.mini_batch_size},
        "causes": [{"cause": name, "bias": bias} for name, bias in finding.causes.items()],
        "verdict": finding.verdict,
        "text": finding.text,
    }
    if not options.json:
        console = Console()
        console.say(
            f"{PROMPTS} prompts, {num_answers} answers, groups of {method.group}; bias: part of "
            "the exact gradient that is missing whatever the learning rate"
        )
        for update, parts in finding.compared.items():
            console.say(f"{update} update on a rollout")
            for part, match in parts.items():
                bias, cosine = match
                console.say(f"  {WORDS[part]:<22} bias {bias:6.3f}  cosine {cosine:7.4f}")
        console.say(
            f"{sampled.batches} sampled mini-batches of {ppo.mini_batch_size}: the noise of one is "
            f"{sampled.noise:.2f} times the gradient's norm; their mean has a bias of "
            f"{sampled.bias:.3f}, by chance alone about {sampled.bias_of_noise:.3f}"
        )
        console.say(finding.text)
    return Result(content, WRONG_WAY if finding.verdict is Direction.wrong_way else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
