"""The hook that weighs or masks losses of responses that another policy sampled.

``rollout.responses.logprobs_BT`` are log-probs by the policy that sampled, ``rollout.logprobs_BT``
by the proximal policy, from which the updates start (ppo.rollout_correction).
Shapes: B = sequences of this rank, T = response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from rlhf.algorithms.ppo import PolicyLoss
from rlhf.base.metrics import Mean, Metrics, Minimum, Moments
from rlhf.base.ranks import Ranks
from rlhf.base.types import Rollout
from rlhf.config.choices import When
from rlhf.options import PpoConfig
from rlhf.options.corrections.keys import CorrectionMode, RolloutCorrection
from rlhf.options.corrections.off_policy import (
    CorrectionLevel,
    RolloutWeights,
    off_policy_mask,
    rollout_weights,
    sampled_units,
)
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.objective import Surrogate, SurrogateInputs, Total, learned_mask
from rlhf.phases.ppo.targets import TargetMaker, Targets, TargetSteps


class CorrectionHook(PpoHook):
    """A hook that multiplies a step's advantages by importance weights once, before the updates.

    With ppo.off_policy_mask_kl each update also masks the tokens with negative advantages in
    responses that have become unlikely under the policy.
    """

    @property
    def _weighs(self) -> bool:
        return self.config.ppo.rollout_correction is not RolloutCorrection.none

    @property
    def logprob_reuse_mode_for_auto(self) -> When | None:
        """Return ``When.never``: weights need log-probs by the policy at the step's start."""
        return When.never if self._weighs else None

    def change_target_steps(self, steps: TargetSteps) -> TargetSteps:
        """Return ``steps``; with ppo.rollout_correction, also the step that weighs advantages."""
        return (*steps, self._weigh_advantages) if self._weighs else steps

    def change_surrogate(self, surrogate: Surrogate) -> Surrogate:
        """Return ``surrogate``, with a mask if ppo.off_policy_mask_kl is set."""
        max_kl = self.config.ppo.off_policy_mask_kl
        return surrogate if max_kl is None else _mask_off_policy(surrogate, max_kl)

    def prepare_rollout(
        self, trainer: PPOTrainer, rollout: Rollout
    ) -> tuple[Rollout, dict[str, float]]:
        """Scale the actor's learning rate for the step, if ppo.rollout_correction_lr is set."""
        ppo = self.config.ppo
        if not ppo.rollout_correction_lr or ppo.rollout_correction is RolloutCorrection.none:
            return rollout, {}
        share = effective_sample_share(ppo, rollout, trainer.engine.ranks)
        trainer.engine.actor.lr_scale = math.sqrt(share)
        return rollout, {"ppo/lr_scale": math.sqrt(share)}

    def _weigh_advantages(self, maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
        """Multiply advantages by importance weights, if log-probs were measured while sampling.

        Weights are not negative, so the loss of a token is multiplied by its weight too.
        """
        config, sampled_BT = maker.config, rollout.responses.logprobs_BT
        if sampled_BT is None:
            return targets
        keep_BT, old = rollout.responses.keep_BT, targets.advantages
        learned_BT = learned_mask(config, rollout)
        weights = rollout_weights(
            rollout.logprobs_BT,
            sampled_BT,
            keep_BT,
            level=cast(CorrectionLevel, config.rollout_correction.value),
            cap=config.rollout_correction_cap,
            masks=config.rollout_correction_mode is CorrectionMode.mask,
            floor=config.rollout_correction_floor,
        )
        return targets._replace(
            advantages=old._replace(advantages_BT=old.advantages_BT * weights.weights_BT),
            metrics={**targets.metrics, **correction_metrics(weights, learned_BT)},
        )


def _mask_off_policy(surrogate: Surrogate, max_kl: float) -> Surrogate:
    """Return ``surrogate`` without the loss of the tokens that ``off_policy_mask`` masks."""

    def masked_surrogate(
        inputs: SurrogateInputs, config: PpoConfig, total: Total, /
    ) -> tuple[PolicyLoss, Metrics]:
        logprobs = (inputs.logprobs_BT, inputs.sampled_logprobs_BT)
        masked_BT = off_policy_mask(*logprobs, inputs.advantages_BT, inputs.keep_BT, max_kl=max_kl)
        used_BT = inputs.advantages_BT.masked_fill(masked_BT, 0.0)
        loss, metrics = surrogate(inputs._replace(advantages_BT=used_BT), config, total)
        share = Mean.of(masked_BT.float(), inputs.keep_BT)
        return loss, metrics | {"ppo/off_policy_masked_share": share}

    return masked_surrogate


@dataclass(frozen=True, slots=True)
class SampleSize(Moments):
    """The effective sample size of weights, as a share of their number."""

    def value(self) -> float:
        """Return the squared mean divided by the mean square; 0 if all weights are 0."""
        return (self.mean.square() / self.mean_square.clamp(min=1e-300)).item()


def effective_sample_share(config: PpoConfig, rollout: Rollout, ranks: Ranks) -> float:
    """Return the effective sample size of a rollout's weights as a share of their number (0 to 1).

    VCPO (https://arxiv.org/abs/2602.17616) multiplies the learning rate by the root of this share,
    since AdamW's best rate grows with the root of the batch size. As in VCPO's code, weights have
    no limits here. At the levels sequence and geometric a response counts once. Tokens without a
    loss do not count. The share is 1 if log-probs were not measured while sampling.
    """
    sampled_BT, keep_BT = rollout.responses.logprobs_BT, rollout.responses.keep_BT
    if sampled_BT is None:
        return 1.0
    level = cast(CorrectionLevel, config.rollout_correction.value)
    weights = rollout_weights(rollout.logprobs_BT, sampled_BT, keep_BT, level=level, cap=math.inf)
    units_BT = sampled_units(learned_mask(config, rollout), level=level)
    size = SampleSize.of(weights.weights_BT.double(), units_BT)
    return ranks.reduce_metrics({"size": size})["size"].value()


def correction_metrics(weights: RolloutWeights, keep_BT: Tensor) -> Metrics:
    """Return metrics of the importance weights of the tokens that enter the losses."""
    return {
        "ppo/rollout_weight": Mean.of(weights.weights_BT, keep_BT),
        "ppo/rollout_weight_min": Minimum.of(weights.weights_BT, keep_BT),
        "ppo/rollout_limited_share": Mean.of(weights.limited_BT, keep_BT),
        "ppo/rollout_sample_size": SampleSize.of(weights.weights_BT, keep_BT),
    }
