"""Evaluate the policy during PPO, and save PPO's models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf.base.intervals import mean_with_interval
from rlhf.base.stored_files import HELD_OUT
from rlhf.config.choices import Phase
from rlhf.phases.ppo.hooks import ActorVariant, PpoHook
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.phases.shared.context import RunContext, phase_records
from rlhf.phases.shared.exporting import save_export, save_trained_model
from rlhf.phases.shared.policy_evaluation import (
    HeldOutPrompts,
    HeldOutTargets,
    PolicyEvaluation,
    evaluate_policy,
    sample_answers,
)
from rlhf.run.results import write_json

if TYPE_CHECKING:
    from datasets import Dataset

# Measures whose mean gains are reported, and NAME in NAME_gain_ci of result.json.
GAINS = {"score": "score", "gold/gold": "gold", "gold/exact": "exact"}


class PpoEvaluation:
    """An evaluator of the policy, which uses the same held-out prompts at every step."""

    def __init__(
        self, context: RunContext, engine: RLHFEngine, examples: Dataset, hooks: Sequence[PpoHook]
    ) -> None:
        self._context = context
        self._engine = engine
        self._prompts = HeldOutPrompts(examples, phase_records(context, Phase.ppo).eval)
        self._by_prompt: dict[str, dict[str, list[float]]] = {}
        self._hooks = hooks
        self.variants = [each for hook in hooks for each in hook.actor_variants(engine)]

    def restore_held_out_values(self) -> None:
        """Read the values that an earlier attempt of this phase wrote to ppo/held_out.json."""
        self._by_prompt = HELD_OUT.read(self._context.run_dir) or {}

    def evaluate_for_result(
        self, when: str, *, log: Callable[[dict[str, float]], None] | None = None
    ) -> dict[str, Any]:
        """Evaluate the policy; return entries of result.json: measures, and results of the hooks.

        Names of measures end in ``when``. If it is "after", 95 % intervals of the mean gains since
        "before", and comparison values of an environment, are returned too. ``log`` is called with
        the metrics. Each prompt's values are stored in ppo/held_out.json.
        """
        evaluation = self.evaluate()
        result = evaluation.results(self._context.config, when)
        self._by_prompt[when] = evaluation.by_prompt
        if self._context.ranks.is_main:
            write_json(self._context.run_dir / HELD_OUT, self._by_prompt, indent=None)
        if log is not None:
            log(evaluation.metrics())
        if when == "after":
            result |= self._gain_intervals() | self._environment_comparison_values()
        for hook in self._hooks:
            result |= hook.results(self._engine, self._prompts, when)
        return result

    def _gain_intervals(self) -> dict[str, Any]:
        """Return 95 % intervals of the mean gains of GAINS, and of rewards whose weight is 0."""
        before, after = self._by_prompt["before"], self._by_prompt["after"]
        parts = self._context.config.rewards.items()
        judges = {f"parts/{name}": name for name, part in parts if part.weight == 0}
        bounds = {}
        for name in (each for each in (*GAINS, *judges) if each in before):
            pairs = zip(before[name], after[name], strict=True)
            gain = mean_with_interval([b - a for a, b in pairs])
            if math.isfinite(gain.half):  # False for a single prompt, or if a score is not finite
                bounds[name] = [gain.low, gain.high]
        result: dict[str, Any] = {
            f"{title}_gain_ci": bounds[name] for name, title in GAINS.items() if name in bounds
        }
        if gains := {title: bounds[name] for name, title in judges.items() if name in bounds}:
            result["judge_gains"] = gains
        return result

    def _environment_comparison_values(self) -> dict[str, float]:
        """Return what an optimal and a random policy earn in the environment, as far as known."""
        rows = self._prompts.examples["row"][: self._context.config.ppo.eval_prompts]
        return self._engine.backends.comparison_values([self._prompts.records[row] for row in rows])

    def write_samples(
        self, targets: HeldOutTargets, *, step: int, ends_with: int | None = None
    ) -> None:
        """Log answers to a few held-out prompts; after the last step also answers of variants.

        ``ends_with`` is the step of the weights that PPO ends with (checkpoint.load_best); None:
        more steps follow. Prompts and random numbers are the same at every step, so that answers
        can be compared.
        """
        context, config = self._context, self._context.config.ppo
        answer = partial(sample_answers, context, self._engine.policy, self._prompts, targets)
        samples = answer(model="actor")
        for variant in self.variants if ends_with is not None else []:
            with variant.swap_in():
                samples += answer(model=f"actor_{variant.name}")
        if ends_with not in (None, step):
            samples = [sample._replace(weights_step=ends_with) for sample in samples]
        context.tracker.samples("ppo", step, samples, steps=config.steps or step)

    def evaluate(self) -> PolicyEvaluation:
        """Evaluate the policy on ``ppo.eval_prompts`` held-out prompts."""
        num_prompts = self._context.config.ppo.eval_prompts
        policy = self._engine.policy
        return evaluate_policy(self._context, policy, self._prompts, num_prompts=num_prompts)


def save_models(context: RunContext, engine: RLHFEngine, variants: Sequence[ActorVariant]) -> None:
    """Write the actor, its variants and the critic, if there is one."""
    folder = context.run_dir / "ppo"
    actor, source = engine.actor, engine.policy_source
    what = "A language model after PPO."
    save_trained_model(context, actor, folder / "actor", source=source, what=what)
    for variant in variants:
        variant_folder = folder / f"actor_{variant.name}"
        with variant.swap_in():
            save_trained_model(context, actor, variant_folder, source=source, what=variant.what)
    what = "PPO's critic: one label, read at every position."
    if (critic := engine.build_critic_export()) is not None:
        save_export(context, critic, folder / "critic", what=what, answers=False)
