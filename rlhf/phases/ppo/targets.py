"""Compute advantages and returns of a rollout, the targets of PPO's updates.

Shapes: B = sequences of this rank, T = response tokens, G = groups of R compared responses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.advantages import (
    Advantages,
    clip_scores,
    gae,
    grpo_advantages,
    length_adaptive_lam,
    reinforce_pp_advantages,
    rloo_advantages,
    scale_scores,
    token_rewards,
)
from rlhf.algorithms.kl import estimate_kl
from rlhf.algorithms.masking import whiten
from rlhf.base.metrics import Metric, Moments
from rlhf.base.ranks import Ranks
from rlhf.base.types import Rollout, TokenTargets
from rlhf.config.choices import AdvantageEstimator, KlPlacement, ScaleReward
from rlhf.config.schema.ppo import COMPARING
from rlhf.config.schema.rewards import RewardTerm
from rlhf.options import PpoConfig
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.objective import learned_mask
from rlhf.phases.ppo.reward_mix import sum_weighted_scores


class Targets(NamedTuple):
    """Rewards, advantages and returns of a rollout; 0 until their step of ``STEPS`` has run."""

    kl_ctl: float
    compared: int  # number of responses to a prompt that the estimator compares; 1: none
    scores_B: Tensor  # responses' scores without KL penalty, as scaled and clipped so far
    kl_BT: Tensor
    penalty_BT: Tensor  # the KL penalty in rewards_BT
    rewards_BT: Tensor  # token rewards before whitening
    scaled_rewards_BT: Tensor  # whitened if configured; estimators read these rewards
    raw: Advantages  # before whitening
    advantages: Advantages  # whitened if configured; the updates use these advantages
    metrics: Mapping[str, Metric] = {}

    @property
    def clipped_scores_GR(self) -> Tensor:
        """Return the scores in groups of compared responses."""
        return self.scores_B.view(-1, self.compared)


class TargetMaker:
    """A class that computes targets from rollouts by the steps ``STEPS``, which hooks may change.

    It stores the moments by which scores are scaled: of all rollouts so far, or fixed moments.
    """

    def __init__(
        self,
        config: PpoConfig,
        ranks: Ranks,
        parts: Mapping[str, RewardTerm] | None = None,
        hooks: Sequence[PpoHook] = (),
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.parts = parts or {}
        self.steps: TargetSteps = STEPS
        for hook in hooks:
            self.steps = hook.change_target_steps(self.steps)
        self.moments: Moments | None = None
        self.part_moments: dict[str, Moments] = {}  # one for each part with normalise=true

    def update_moments(self, rollout: Rollout) -> None:
        """Add the scores of a rollout to the moments for scaling, unless they are fixed."""
        for number, (name, part) in enumerate(self.parts.items()):
            if part.normalise:
                now = self._moments_of_finite_scores(_scores_of_part(rollout, number))
                so_far = self.part_moments.get(name)
                self.part_moments[name] = now if so_far is None else so_far + now
        if self.config.scale_reward is not ScaleReward.none:
            combined = self._run_steps(rollout, last=combine_parts)
            self.moments = self._updated_moments(combined.scores_B)

    def state_dict(self) -> dict[str, Any]:
        """Return the moments that scale the scores and their parts, as JSON values."""
        of_scores = None if self.moments is None else _moments_to_list(self.moments)
        return {"scores": of_scores} | {
            f"parts/{name}": _moments_to_list(each) for name, each in self.part_moments.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the moments from what ``state_dict`` returned."""
        device = self.ranks.device
        moments = {
            name: Moments(*torch.tensor(each, dtype=torch.float64, device=device))
            for name, each in state.items()
            if each is not None
        }
        self.moments = moments.pop("scores", None)
        self.part_moments = {name.removeprefix("parts/"): each for name, each in moments.items()}

    def held_out_targets(self, rollout: Rollout, *, kl_ctl: float) -> TokenTargets | None:
        """Return the rewards and advantages of answers to held-out prompts, before whitening.

        Scores are scaled by the moments so far. Returns None for estimators other than GAE.
        """
        if self.config.advantage_estimator is not AdvantageEstimator.gae:
            return None  # most other estimators compare responses; held-out prompts have one
        targets = self.make(rollout, kl_ctl=kl_ctl)
        return TokenTargets(targets.rewards_BT, targets.raw.advantages_BT)

    def make(self, rollout: Rollout, *, kl_ctl: float) -> Targets:
        """Return the targets of one rollout, under the KL coefficient ``kl_ctl``."""
        return self._run_steps(rollout, kl_ctl=kl_ctl)

    def clipped_scores(self, rollout: Rollout) -> Tensor:
        """Return the scores (B,) after scaling, clipping and the penalty for a missing end."""
        return self._run_steps(rollout, last=clip_and_penalise).scores_B

    def _run_steps(
        self, rollout: Rollout, *, kl_ctl: float = 0.0, last: TargetStep | None = None
    ) -> Targets:
        """Run the steps up to ``last`` or its replacement (None: all); later results stay 0."""
        is_compared = self.config.advantage_estimator in COMPARING
        compared = self.config.responses_per_prompt if is_compared else 1
        zeros_BT = torch.zeros_like(rollout.values_BT)
        zero_advantages = Advantages(zeros_BT, zeros_BT)
        scores_B, of_tokens = rollout.scores_B, (zeros_BT, zeros_BT, zeros_BT, zeros_BT)
        targets = Targets(kl_ctl, compared, scores_B, *of_tokens, zero_advantages, zero_advantages)
        for step in self.steps if last is None else self.steps[: STEPS.index(last) + 1]:
            targets = step(self, targets, rollout)
        return targets

    def _updated_moments(self, scores_B: Tensor) -> Moments | None:
        """Return the moments for scaling ``scores_B``; None until a rollout has a finite score."""
        now = self._moments_of_finite_scores(scores_B)
        if self.moments is None:
            return _initial_moments(self.config, now) if now.count else None
        is_running = self.config.scale_reward is ScaleReward.running
        return self.moments + now if is_running else self.moments

    def whiten(self, x_BT: Tensor, keep_BT: Tensor, *, shift_mean: bool) -> Tensor:
        """Return ``x_BT`` whitened over the tokens of all ranks where ``keep_BT`` is True."""
        moments = self.moments_over_ranks(x_BT, keep_BT)
        return whiten(x_BT, keep_BT, moments, shift_mean=shift_mean)

    def _moments_of_finite_scores(self, scores_B: Tensor) -> Moments:
        """Return the moments of the finite scores; a NaN would never leave the running sums."""
        return self.moments_over_ranks(scores_B, scores_B.isfinite())

    def moments_over_ranks(self, x: Tensor, keep: Tensor) -> Moments:
        """Return the moments of ``x`` where ``keep`` is True, over all ranks."""
        moments = self.ranks.reduce_metrics({"x": Moments.of(x, keep)})["x"]
        assert isinstance(moments, Moments)
        return moments


def combine_parts(maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
    """Scale parts with normalise=true, and replace the scores by the weighted sum of all parts.

    Parts that reward tokens are added later, by ``make_token_rewards``.
    """
    of_tokens = _rewards_of_tokens(rollout)
    if not maker.part_moments and not of_tokens:
        return targets
    scores_BK = [_scores_of_part(rollout, number) for number in range(len(maker.parts))]
    for number, name in enumerate(maker.parts):
        if name in of_tokens:
            scores_BK[number] = torch.zeros_like(scores_BK[number])
        elif name in maker.part_moments:
            moments = maker.part_moments[name]
            scores_BK[number] = scale_scores(scores_BK[number], moments, shift_mean=True)
    combined_B = sum_weighted_scores(maker.parts, torch.stack(scores_BK, dim=1))
    return targets._replace(scores_B=combined_B)


def scale_combined_scores(maker: TargetMaker, targets: Targets, _: Rollout) -> Targets:
    """Scale scores by their moments, if ppo.scale_reward is not none."""
    if maker.moments is None:
        return targets
    shifts = maker.config.scale_reward_shift
    scaled_B = scale_scores(targets.scores_B, maker.moments, shift_mean=shifts)
    return targets._replace(scores_B=scaled_B)


def clip_and_penalise(maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
    """Clip scores, and penalise responses that never ended."""
    config = maker.config
    clipped_B = clip_scores(
        targets.scores_B,
        rollout.responses.ended_B,
        clip=config.clip_reward_value,
        missing_end_penalty=config.missing_end_penalty,
        missing_end_score=config.missing_end_score,
    )
    return targets._replace(scores_B=clipped_B)


def make_token_rewards(maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
    """Turn scores into token rewards, minus the KL penalty if ppo.kl_placement=reward.

    Weighted rewards that parts give to tokens are added, clipped to +-ppo.clip_reward_value.
    """
    config, keep_BT = maker.config, rollout.responses.keep_BT
    sides = (rollout.logprobs_BT, rollout.reference_logprobs_BT)
    kl_BT = estimate_kl(*sides, estimator=config.kl_estimator.value)
    kl_ctl = targets.kl_ctl if config.kl_placement is KlPlacement.reward else 0.0
    rewards_BT = token_rewards(kl_BT, targets.scores_B, keep_BT, kl_ctl=kl_ctl)
    of_tokens, scores_B = _rewards_of_tokens(rollout), targets.scores_B
    if of_tokens:
        added = [maker.parts[name].weight * each_BT for name, each_BT in of_tokens.items()]
        limit = math.inf if config.clip_reward_value is None else config.clip_reward_value
        added_BT = torch.stack(added).sum(dim=0).clamp(-limit, limit)
        rewards_BT, scores_B = rewards_BT + added_BT, scores_B + added_BT.sum(dim=1)
    return targets._replace(
        scores_B=scores_B, kl_BT=kl_BT, penalty_BT=kl_ctl * kl_BT, rewards_BT=rewards_BT
    )


def whiten_rewards(maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
    """Scale token rewards to deviation 1, if ppo.whiten_rewards is set."""
    scaled_BT = targets.rewards_BT
    if maker.config.whiten_rewards:
        learned_BT = learned_mask(maker.config, rollout)
        scaled_BT = maker.whiten(scaled_BT, learned_BT, shift_mean=False)
    return targets._replace(scaled_rewards_BT=scaled_BT)


def estimate_advantages(maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
    """Estimate advantages from token rewards; the rows of one prompt are adjacent.

    A method with another estimator replaces this step, by ``PpoHook.change_target_steps``.
    """
    config, keep_BT = maker.config, rollout.responses.keep_BT
    rewards_BT, group = targets.scaled_rewards_BT, config.responses_per_prompt
    match config.advantage_estimator:
        case AdvantageEstimator.gae:
            values_BT, gamma = rollout.values_BT, config.gamma
            estimate = partial(gae, rewards_BT, values_BT, keep_BT, gamma=gamma)
            raw = estimate_with_decoupled_lambdas(estimate, keep_BT, config)
        case AdvantageEstimator.rloo:
            raw = rloo_advantages(rewards_BT, keep_BT, group_size=group)
        case AdvantageEstimator.grpo:
            raw = grpo_advantages(rewards_BT, keep_BT, group_size=group)
        case AdvantageEstimator.dr_grpo:
            raw = grpo_advantages(rewards_BT, keep_BT, group_size=group, divides=False)
        case AdvantageEstimator.reinforce_pp:
            raw = reinforce_pp_advantages(rewards_BT, keep_BT, gamma=config.gamma)
    return targets._replace(raw=raw)


def subtract_own_kl(maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
    """With ppo.kl_placement=advantage, subtract each token's KL from its own advantage.

    No other token's advantage changes: https://thinkingmachines.ai/blog/on-policy-distillation.
    """
    if maker.config.kl_placement is not KlPlacement.advantage:
        return targets
    raw, keep_BT = targets.raw, rollout.responses.keep_BT
    own_BT = (targets.kl_ctl * targets.kl_BT).masked_fill(~keep_BT, 0.0)
    return targets._replace(raw=raw._replace(advantages_BT=raw.advantages_BT - own_BT))


def whiten_advantages(maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
    """Shift and scale advantages to mean 0 and deviation 1, if configured."""
    raw, used_BT = targets.raw, targets.raw.advantages_BT
    if maker.config.whitens_advantages:
        used_BT = maker.whiten(used_BT, learned_mask(maker.config, rollout), shift_mean=True)
    return targets._replace(advantages=raw._replace(advantages_BT=used_BT))


TargetStep = Callable[[TargetMaker, Targets, Rollout], Targets]
TargetSteps = tuple[TargetStep, ...]
# ``last`` and ``replace_step`` find steps by their position here: never insert a step in between.
STEPS: TargetSteps = (
    combine_parts,
    scale_combined_scores,
    clip_and_penalise,
    make_token_rewards,
    whiten_rewards,
    estimate_advantages,
    subtract_own_kl,
    whiten_advantages,
)


def replace_step(steps: TargetSteps, old: TargetStep, new: TargetStep) -> TargetSteps:
    """Return ``steps`` with ``new`` at the position that ``old`` has in ``STEPS``."""
    position = STEPS.index(old)
    return (*steps[:position], new, *steps[position + 1 :])


def _initial_moments(config: PpoConfig, first: Moments) -> Moments:
    """Return the ``first`` rollout's moments; ppo.reference_score_mean and _std replace them."""
    if config.scale_reward is ScaleReward.running:
        return first
    reference_mean, reference_std = config.reference_score_mean, config.reference_score_std
    mean = first.value() if reference_mean is None else reference_mean
    std = first.std() if reference_std is None else reference_std
    total = torch.tensor(mean, dtype=torch.float64, device=first.total.device)
    return Moments(total, total.square() + std**2, torch.ones_like(total))


def estimate_with_decoupled_lambdas(
    estimate: Callable[..., Advantages], keep_BT: Tensor, config: PpoConfig
) -> Advantages:
    """Return advantages with the actor's lambda and returns with the critic's lambda.

    This is VC-PPO's decoupled GAE, https://arxiv.org/abs/2503.01491 section 3.3.
    """
    lam: float | Tensor = config.lam
    if config.lam_length_alpha is not None:
        lam = length_adaptive_lam(keep_BT, alpha=config.lam_length_alpha)
    actor = estimate(lam=lam)
    if config.lam_length_alpha is None and config.lam_critic is None:
        return actor
    lam_critic = config.lam if config.lam_critic is None else config.lam_critic
    return Advantages(actor.advantages_BT, estimate(lam=lam_critic).returns_BT)


def _rewards_of_tokens(rollout: Rollout) -> Mapping[str, Tensor]:
    return {} if rollout.parts is None else rollout.parts.of_tokens


def _scores_of_part(rollout: Rollout, number: int) -> Tensor:
    assert rollout.parts is not None, "the rollout was scored without parts"
    return rollout.parts.scores_BK[:, number]


def _moments_to_list(moments: Moments) -> list[float]:
    return [float(each) for each in (moments.total, moments.square_total, moments.count)]
