"""Measure the bias of a method, find the keys that explain it, and put the result in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from enum import StrEnum
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.config.choices import AdvantageEstimator, KlEstimator, KlPlacement
from rlhf.config.schema.keys import LossLimit
from rlhf.config.schema.ppo import LossAggregation
from rlhf.methods import installed_methods
from rlhf.options import PpoConfig
from rlhf_lab.gradients.expected import GradientEstimator, Policies, TinyStep, TinyTask

UPDATE_KL = 0.01  # nats per token that the updates of a step move the policy, without a limit
EXACT = 1e-9  # a smaller bias is rounding
ROUNDING = 1e-10  # a smaller gradient, relative to the exact one, is rounding
LEAST_SHARE = 0.1  # least share of the bias that a key must explain to be named

WORDS: Mapping[str, str] = {  # part of the objective -> its name for readers
    "objective": "the whole objective",
    "score": "the score alone",
    "kl": "the KL penalty alone",
}


class Direction(StrEnum):
    """The relation of the expected gradient to the exact gradient."""

    unbiased = "unbiased"
    biased = "biased"
    wrong_way = "points the wrong way"


class GradientMatch(NamedTuple):
    """A comparison of an expected gradient, up to its scale, with the exact gradient."""

    bias: float
    """Share of the exact gradient's norm that no scale of the expected gradient recovers."""
    cosine: float

    @classmethod
    def of(cls, gradient: Tensor, exact: Tensor) -> GradientMatch:
        """Compare two gradients; a gradient of 0 (up to rounding) has bias 1 and cosine 0."""
        if float(gradient.norm()) <= ROUNDING * float(exact.norm()):
            return cls(1.0, 0.0)
        product, square = (gradient * exact).sum(), gradient.square().sum()
        scale = (product / square).clamp(min=0.0)
        bias = (scale * gradient - exact).norm() / exact.norm()
        cosine = product / (square.sqrt() * exact.norm())
        return cls(float(bias), float(cosine))


class Cause(NamedTuple):
    """A key whose value biases the gradient on purpose, and values of keys that remove the bias."""

    key: str
    why: str
    holds: Callable[[PpoConfig], bool]
    without: Mapping[str, object]


def _penalises_in(*places: KlPlacement) -> Callable[[PpoConfig], bool]:
    return lambda ppo: ppo.kl_ctl > 0 and ppo.kl_placement in places


def _values_without(name: str) -> dict[str, object]:
    """Return the values that lift the limit ``name`` and the limits that its method replaces."""
    methods = [method for method in installed_methods() if f"ppo.{name}" in method.off]
    replaced = [key.removeprefix("ppo.") for method in methods for key in method.unread]
    return {key: LIMITS[key].off for key in (name, *replaced) if key in LIMITS}


def _limits(name: str, ppo: PpoConfig) -> bool:
    return getattr(ppo, name) not in (None, NO_LIMITS[name])


LIMITS: dict[str, LossLimit] = {
    f.name: f.metadata["limit"] for f in fields(PpoConfig) if "limit" in f.metadata
}
NO_LIMITS = {name: limit.off for name, limit in LIMITS.items()}
OWN_CODE = "your own code"
CAUSES = (
    *(
        Cause(name, limit.effect, partial(_limits, name), _values_without(name))
        for name, limit in LIMITS.items()
    ),
    Cause(
        "kl_estimator",
        "in the loss its gradient is that of KL(reference || policy)",
        lambda ppo: _penalises_in(KlPlacement.loss)(ppo) and ppo.kl_estimator == "k3",
        {"kl_estimator": KlEstimator.k3_ratio},
    ),
    Cause(
        "kl_estimator",
        "outside of the loss only k1 has the gradient of the KL",
        lambda ppo: not _penalises_in(KlPlacement.loss)(ppo) and ppo.kl_estimator != "k1",
        {"kl_estimator": KlEstimator.k1},
    ),
    Cause(
        "kl_placement",
        "a token does not pay for the KL of the tokens after it",
        _penalises_in(KlPlacement.loss, KlPlacement.advantage),
        {"kl_placement": KlPlacement.reward, "kl_estimator": KlEstimator.k1},
    ),
    Cause(
        "advantage_estimator",
        "division by a group's deviation weights prompts, and depends on the response itself",
        lambda ppo: ppo.advantage_estimator is AdvantageEstimator.grpo,
        {"advantage_estimator": AdvantageEstimator.dr_grpo},
    ),
    Cause(
        "loss_aggregation",
        "tokens of short responses weigh more",
        lambda ppo: ppo.loss_aggregation is LossAggregation.sequence_mean,
        {"loss_aggregation": LossAggregation.fixed_length},
    ),
    Cause(
        "missing_end_mask",
        "responses that never ended are left out",
        lambda ppo: ppo.missing_end_mask,
        {"missing_end_mask": False},
    ),
    Cause(
        "whiten_rewards",
        "a token earns a share of the mean reward",
        lambda ppo: ppo.whiten_rewards,
        {"whiten_rewards": False},
    ),
    Cause("gamma", "later rewards count less", lambda ppo: ppo.gamma < 1, {"gamma": 1.0}),
    Cause(
        "entropy_coef",
        "the loss has the entropy too",
        lambda ppo: ppo.entropy_coef > 0,
        {"entropy_coef": 0.0},
    ),
)


class GradientFinding(NamedTuple):
    """The comparisons of a method, by update and part of the objective, and conclusions."""

    compared: Mapping[str, Mapping[str, GradientMatch]]
    causes: Mapping[str, float]
    """The reasons for the first update's bias, with the bias left after removing each in turn."""
    verdict: Direction
    text: str


def policies_of_updates(method: GradientEstimator, task: TinyTask) -> dict[str, Policies]:
    """Return the policies of the first update on a rollout, and of the last if there are several.

    Updates, and steps of rollout.lag, follow the method's own expected gradient.
    """
    ppo, lag = method.config.ppo, method.config.rollout.lag
    start_QPV, nats = task.policy_QPV, ppo.stop_update_kl or ppo.lr_guard_kl or UPDATE_KL
    on_policy = Policies(start_QPV, start_QPV, start_QPV)
    direction_QPV = TinyStep(method, task, on_policy).expected_gradient()
    if not direction_QPV.any():
        return {"first": on_policy}
    if lag:
        on_policy = on_policy._replace(sampled_QPV=task.move(start_QPV, -direction_QPV, nats * lag))
    policies = {"first": on_policy}
    if ppo.ppo_epochs * ppo.rollout_batch_size > ppo.mini_batch_size:
        policies["last"] = on_policy._replace(current_QPV=task.move(start_QPV, direction_QPV, nats))
    return policies


def compare(method: GradientEstimator, task: TinyTask, policies: Policies) -> GradientMatch:
    """Compare the method's expected gradient with the exact gradient of its objective."""
    step = TinyStep(method, task, policies)
    return GradientMatch.of(step.expected_gradient(), step.exact_gradient())


def split_objective(
    method: GradientEstimator, task: TinyTask
) -> dict[str, tuple[GradientEstimator, TinyTask]]:
    """Return method and task for the whole objective, the score alone and the KL penalty alone."""
    parts = {"objective": (method, task)}
    if method.config.ppo.kl_ctl > 0:
        plain = method.with_keys(entropy_coef=0.0)
        unscored = task._replace(scores_QA=torch.zeros_like(task.scores_QA))
        only_kl = plain.with_keys(missing_end_penalty=0.0, missing_end_score=None)
        parts |= {"score": (plain.with_keys(kl_ctl=0.0), task), "kl": (only_kl, unscored)}
    return parts


def examine(method: GradientEstimator, task: TinyTask) -> GradientFinding:
    """Compare all gradients of a method; return the comparisons and conclusions from them."""
    updates = policies_of_updates(method, task)
    parts = split_objective(method, task)
    compared = {
        update: {name: compare(*part, policies) for name, part in parts.items()}
        for update, policies in updates.items()
    }
    first = compared["first"]["objective"]
    causes = find_causes(method, task, updates["first"], first.bias)
    fresh = updates["first"]._replace(sampled_QPV=task.policy_QPV)  # lag is no sign error
    reversed_parts = [name for name, part in parts.items() if compare(*part, fresh).cosine < 0]
    reasons = {name: [*find_causes(*parts[name], fresh, 1.0)] for name in reversed_parts}
    wrong = [n for n in reversed_parts if not reasons[n] or any(OWN_CODE in r for r in reasons[n])]
    verdict = Direction.unbiased if first.bias <= EXACT else Direction.biased
    verdict = Direction.wrong_way if wrong else verdict
    text = _sentence(method, verdict, first, causes, wrong)
    for name in (name for name in reversed_parts if not wrong):
        keys = " and ".join(reason.partition(": ")[0] for reason in reasons[name])
        text += f" On this task the gradient of {WORDS[name]} even points the wrong way: {keys}."
    if "last" in compared and (last := compared["last"]["objective"]).bias > first.bias + EXACT:
        unlimited = compare(method.with_keys(**NO_LIMITS), task, updates["last"]).bias
        text += f" At the last update on a rollout the bias is {last.bias:.2g}; without limits, it "
        text += f"is {unlimited:.2g}."
    return GradientFinding(compared, causes, verdict, text)


def find_causes(
    method: GradientEstimator, task: TinyTask, policies: Policies, bias: float
) -> dict[str, float]:
    """Remove the reasons for ``bias`` one after another; return the bias that is left after each.

    The reason whose removal leaves least bias comes first; rollout.lag, which limits need, is last.
    """
    biases_left: dict[str, float] = {}
    while bias > EXACT:
        variants = {
            name: (other is method, compare(other, task, with_policies).bias, other, with_policies)
            for name, (other, with_policies) in _variants(method, policies).items()
        }
        large = [name for name, v in variants.items() if v[1] <= (1 - LEAST_SHARE) * bias]
        if not large:
            break
        name = min(large, key=lambda name: variants[name][:2])
        _, bias, method, policies = variants[name]
        biases_left[name] = bias
    return biases_left


def _variants(
    method: GradientEstimator, policies: Policies
) -> dict[str, tuple[GradientEstimator, Policies]]:
    """Return, by reason for a bias, the method and the policies without this reason."""
    ppo = method.config.ppo
    variants: dict[str, tuple[GradientEstimator, Policies]] = {}
    for cause in CAUSES:
        if cause.holds(ppo):
            words = f"ppo.{cause.key}={getattr(ppo, cause.key)}: {cause.why}"
            variants[words] = (method.with_keys(**cause.without), policies)
    if policies.sampled_QPV is not policies.start_QPV:
        words = f"rollout.lag={method.config.rollout.lag}: responses come from an older policy"
        variants[words] = (method, policies._replace(sampled_QPV=policies.start_QPV))
    if own := own_names(method):
        plain = replace(method, surrogate=None, hook=None)
        variants[f"{' and '.join(own)}, {OWN_CODE}"] = (plain, policies)
    return variants


def own_names(method: GradientEstimator) -> list[str]:
    """Return the names of the user's own code."""
    objects = (code for code in (method.hook, method.surrogate) if code is not None)
    return [getattr(code, "__name__", repr(code)) for code in objects]


def _sentence(
    method: GradientEstimator,
    verdict: Direction,
    first: GradientMatch,
    causes: Mapping[str, float],
    wrong: list[str],
) -> str:
    if verdict is Direction.unbiased:
        return "Unbiased: the expected gradient is that of the objective."
    if verdict is Direction.wrong_way:
        what = " and ".join(WORDS[name] for name in wrong)
        where = " and ".join(own_names(method)) or "the loss"
        return f"The gradient of {what} points the wrong way: a sign error in {where}?"
    listed = "; ".join(f"{cause} (without it {_share(bias)})" for cause, bias in causes.items())
    left = min(causes.values(), default=first.bias)
    unknown = f"No key explains {_share(left)} of it." if left > EXACT else ""
    purpose = " on purpose" if causes and not unknown and not own_names(method) else ""
    because = f" because of {listed}" if causes else ""
    return " ".join(filter(None, (f"Biased by {_share(first.bias)}{purpose}{because}.", unknown)))


def _share(bias: float) -> str:
    return "0" if bias <= EXACT else f"{bias:.2g}"
