"""Advantages and returns of a rollout, the targets of its updates.

Shapes: B = sequences of this rank, T = response tokens, G = groups of R compared responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    step_advantages,
    token_rewards,
    turn_gae,
)
from rlhf.algorithms.kl import estimate_kl
from rlhf.algorithms.masking import whiten
from rlhf.base.metrics import Moments
from rlhf.base.ranks import Ranks
from rlhf.base.types import Rollout, TokenTargets
from rlhf.config.choices import AdvantageEstimator, KlPlacement, RewardKind, ScaleReward
from rlhf.config.schema.ppo import COMPARING
from rlhf.config.schema.rewards import RewardTerm
from rlhf.options import PpoConfig
from rlhf.options.corrections.off_policy import RolloutWeights
from rlhf.options.corrections.rollout_logprobs import step_weights
from rlhf.options.environments.keys import GaeUnit
from rlhf.options.environments.turns import Turns, turns_of
from rlhf.phases.ppo.reward_mix import sum_weighted_scores


class Targets(NamedTuple):
    """Rewards, advantages and returns of a rollout, fixed before its first update."""

    advantages: Advantages  # whitened and corrected if configured; the updates use these
    rewards_BT: Tensor  # before whitening
    raw: Advantages  # before whitening and correction
    clipped_scores_GR: Tensor  # rewards without the KL penalty; R is 1 if none are compared
    weights: RolloutWeights | None = None  # factors of the advantages


class TargetMaker:
    """A maker of targets from rollouts: scaled scores, KL penalty, advantages, whitening.

    It stores the moments that scale scores: over all rollouts so far, or of a fixed reference.
    """

    def __init__(
        self,
        config: PpoConfig,
        ranks: Ranks,
        parts: Mapping[str, RewardTerm] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._seed = seed
        self._parts = parts or {}
        self._moments: Moments | None = None
        self._part_moments: dict[str, Moments] = {}  # of parts with normalise=true

    def update_moments(self, rollout: Rollout) -> None:
        """Update the moments that scale scores with the scores of a rollout."""
        for number, (name, part) in enumerate(self._parts.items()):
            if part.normalise:
                now = self._finite_moments(_part_scores(rollout, number))
                so_far = self._part_moments.get(name)
                self._part_moments[name] = now if so_far is None else so_far + now
        if self._config.scale_reward is not ScaleReward.none:
            self._moments = self._updated_moments(self._combine_scores(rollout))

    def state_dict(self) -> dict[str, Any]:
        """Return the moments that scores and their parts are scaled by, as JSON values."""
        of_scores = None if self._moments is None else _as_json(self._moments)
        return {"scores": of_scores} | {
            f"parts/{name}": _as_json(moments) for name, moments in self._part_moments.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the moments from what ``state_dict`` returned."""
        device = self._ranks.device
        moments = {
            name: Moments(*torch.tensor(each, dtype=torch.float64, device=device))
            for name, each in state.items()
            if each is not None
        }
        self._moments = moments.pop("scores", None)
        self._part_moments = {name.removeprefix("parts/"): each for name, each in moments.items()}

    def held_out_targets(self, rollout: Rollout, *, kl_ctl: float) -> TokenTargets | None:
        """Return the rewards and advantages of answers to held-out prompts, before whitening.

        Scores are scaled by the moments so far. Returns None for estimators other than GAE.
        """
        if self._config.advantage_estimator is not AdvantageEstimator.gae:
            return None  # most compare several responses; a held-out prompt has one
        made = self.make(rollout, kl_ctl=kl_ctl)
        return TokenTargets(made.rewards_BT, made.raw.advantages_BT)

    def make(self, rollout: Rollout, *, kl_ctl: float) -> Targets:
        """Return the targets of one rollout, under the KL coefficient ``kl_ctl``."""
        config, keep_BT = self._config, rollout.responses.keep_BT
        scores_B = self.clipped_scores(rollout)
        kl_BT = estimate_kl(
            rollout.logprobs_BT,
            rollout.reference_logprobs_BT,
            estimator=config.kl_estimator.value,
        )
        charged = kl_ctl if config.kl_placement is KlPlacement.reward else 0.0
        shaped_BT = token_rewards(kl_BT, scores_B, keep_BT, kl_ctl=charged)
        if (turns := turns_of(rollout.responses)) is not None:
            of_turns_BT = self._turn_rewards(turns)
            shaped_BT = shaped_BT + of_turns_BT
            scores_B = scores_B + of_turns_BT.sum(dim=1)
        rewards_BT = shaped_BT
        if config.whiten_rewards:
            rewards_BT = self._whiten(shaped_BT, keep_BT, shift_mean=False)
        if config.gae_unit is GaeUnit.turn:
            raw = self._turn_advantages(rewards_BT, charged * kl_BT, rollout)
        else:
            raw = self.advantages(rewards_BT, rollout)
        if config.kl_placement is KlPlacement.advantage:
            # No other token's advantage, https://thinkingmachines.ai/blog/on-policy-distillation.
            own_BT = (kl_ctl * kl_BT).masked_fill(~keep_BT, 0.0)
            raw = raw._replace(advantages_BT=raw.advantages_BT - own_BT)
        used = raw
        if config.whitens_advantages:
            whitened_BT = self._whiten(raw.advantages_BT, keep_BT, shift_mean=True)
            used = raw._replace(advantages_BT=whitened_BT)
        weights = step_weights(config, rollout, seed=self._seed, rank=self._ranks.rank)
        if weights is not None:
            # A factor of an advantage that is not negative scales the token's loss as well.
            used = used._replace(advantages_BT=used.advantages_BT * weights.weights_BT)
        is_compared = config.advantage_estimator in COMPARING
        compared = config.responses_per_prompt if is_compared else 1
        return Targets(used, shaped_BT, raw, scores_B.view(-1, compared), weights)

    def clipped_scores(self, rollout: Rollout) -> Tensor:
        """Return the scores (B,) of whole responses, scaled and clipped, with missing ends."""
        config, scores_B = self._config, self._combine_scores(rollout)
        if self._moments is not None:
            scores_B = scale_scores(scores_B, self._moments, shift_mean=config.scale_reward_shift)
        return clip_scores(
            scores_B,
            rollout.responses.ended_B,
            clip=config.clip_reward_value,
            missing_end_penalty=config.missing_end_penalty,
            missing_end_score=config.missing_end_score,
        )

    def _combine_scores(self, rollout: Rollout) -> Tensor:
        """Return the scores (B,) of whole responses, with normalised parts on one scale.

        The environment's part is left out: its rewards belong to turns.
        """
        if not self._part_moments and turns_of(rollout.responses) is None:
            return rollout.scores_B
        scores_BK = [_part_scores(rollout, number) for number in range(len(self._parts))]
        for number, (name, part) in enumerate(self._parts.items()):
            if part.kind is RewardKind.environment:
                scores_BK[number] = torch.zeros_like(scores_BK[number])
            elif name in self._part_moments:
                moments = self._part_moments[name]
                scores_BK[number] = scale_scores(scores_BK[number], moments, shift_mean=True)
        return sum_weighted_scores(self._parts, torch.stack(scores_BK, dim=1))

    def _turn_rewards(self, turns: Turns) -> Tensor:
        """Return the environment's rewards (B, T), clipped like scores."""
        clip = self._config.clip_reward_value
        weights = [p.weight for p in self._parts.values() if p.kind is RewardKind.environment]
        rewards_BT = sum(weights) * turns.rewards_BT
        return rewards_BT if clip is None else rewards_BT.clamp(-clip, clip)

    def _turn_advantages(
        self, rewards_BT: Tensor, costs_BT: Tensor, rollout: Rollout
    ) -> Advantages:
        """Return advantages with one time step per turn; ``rewards_BT`` include ``costs_BT``."""
        turns, config = turns_of(rollout.responses), self._config
        assert turns is not None, "ppo.gae_unit=turn without an environment"
        estimate = partial(
            turn_gae,
            rewards_BT + costs_BT,
            costs_BT,
            rollout.values_BT,
            turns.turn_BT,
            gamma=config.gamma,
            last_values_B=_values_after_cut(rollout),
        )
        return _decouple(estimate, rollout.responses.keep_BT, config)

    def advantages(self, rewards_BT: Tensor, rollout: Rollout) -> Advantages:
        """Return advantages of token rewards; override this method to use another estimator.

        The rows of one prompt are adjacent. Rewards are 0 at padding.
        """
        config, keep_BT = self._config, rollout.responses.keep_BT
        group = config.responses_per_prompt
        match config.advantage_estimator:
            case AdvantageEstimator.gae if "step_values_BT" in rollout.extras:
                values_BT = rollout.extras["step_values_BT"]
                return step_advantages(rewards_BT, values_BT, keep_BT, gamma=config.gamma)
            case AdvantageEstimator.gae:
                estimate = partial(
                    gae,
                    rewards_BT,
                    rollout.values_BT,
                    keep_BT,
                    gamma=config.gamma,
                    last_values_B=_values_after_cut(rollout),
                )
                return _decouple(estimate, keep_BT, config)
            case AdvantageEstimator.rloo:
                return rloo_advantages(rewards_BT, keep_BT, group_size=group)
            case AdvantageEstimator.grpo:
                return grpo_advantages(rewards_BT, keep_BT, group_size=group)
            case AdvantageEstimator.dr_grpo:
                return grpo_advantages(rewards_BT, keep_BT, group_size=group, divides=False)
            case AdvantageEstimator.reinforce_pp:
                return reinforce_pp_advantages(rewards_BT, keep_BT, gamma=config.gamma)

    def _updated_moments(self, scores_B: Tensor) -> Moments | None:
        """Return the moments that scale scores after this rollout; None without a finite score."""
        now = self._finite_moments(scores_B)
        if self._moments is None:
            return _initial_moments(self._config, now) if now.count else None
        is_running = self._config.scale_reward is ScaleReward.running
        return self._moments + now if is_running else self._moments

    def _whiten(self, x_BT: Tensor, keep_BT: Tensor, *, shift_mean: bool) -> Tensor:
        moments = self._global_moments(x_BT, keep_BT)
        return whiten(x_BT, keep_BT, moments, shift_mean=shift_mean)

    def _finite_moments(self, scores_B: Tensor) -> Moments:
        """Return the moments of the finite scores: one NaN would stay in the sums for ever."""
        return self._global_moments(scores_B, scores_B.isfinite())

    def _global_moments(self, x: Tensor, keep: Tensor) -> Moments:
        moments = self._ranks.reduce_metrics({"x": Moments.of(x, keep)})["x"]
        assert isinstance(moments, Moments)
        return moments


def _initial_moments(config: PpoConfig, first: Moments) -> Moments:
    """Return the first rollout's moments, with the configured reference mean and std if set."""
    if config.scale_reward is ScaleReward.running:
        return first
    given_mean, given_std = config.reference_score_mean, config.reference_score_std
    mean = first.value() if given_mean is None else given_mean
    std = first.std() if given_std is None else given_std
    total = torch.tensor(mean, dtype=torch.float64, device=first.total.device)
    return Moments(total, total.square() + std**2, torch.ones_like(total))


def _decouple(
    estimate: Callable[..., Advantages], keep_BT: Tensor, config: PpoConfig
) -> Advantages:
    """Return advantages with the actor's lambda and returns with the critic's lambda.

    VC-PPO's decoupled GAE, https://arxiv.org/abs/2503.01491 section 3.3.
    """
    lam: float | Tensor = config.lam
    if config.lam_length_alpha is not None:
        lam = length_adaptive_lam(keep_BT, alpha=config.lam_length_alpha)
    actor = estimate(lam=lam)
    if config.lam_length_alpha is None and config.lam_critic is None:
        return actor
    lam_critic = config.lam if config.lam_critic is None else config.lam_critic
    return Advantages(actor.advantages_BT, estimate(lam=lam_critic).returns_BT)


def _values_after_cut(rollout: Rollout) -> Tensor | None:
    """Return the critic's values (B,) of the rest of episodes that were cut; 0 of the others."""
    turns, values_B = turns_of(rollout.responses), rollout.last_values_B
    if turns is None or values_B is None:
        return None
    return values_B.masked_fill(~turns.truncated_B, 0.0)


def _part_scores(rollout: Rollout, number: int) -> Tensor:
    assert rollout.parts is not None, "the rollout was scored without parts"
    return rollout.parts.scores_BK[:, number]


def _as_json(moments: Moments) -> list[float]:
    return [float(each) for each in (moments.total, moments.square_total, moments.count)]
