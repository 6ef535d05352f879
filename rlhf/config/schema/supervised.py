"""Schema of the config groups ``sft``, ``reward`` and ``dpo``, and of the optimizer they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf.config.choices import CombineName, DpoLossName, LossOn, LrSchedule, Phase, RewardLossName
from rlhf.config.schema.keys import (
    ABOVE_0,
    AT_LEAST_0,
    FROM_0_BELOW_1,
    FROM_0_BELOW_HALF,
    FROM_0_TO_1,
    ROWS,
    AtResume,
    Unread,
    key,
    results_of,
)


@dataclass(kw_only=True)
class AdamWConfig:
    """AdamW and its learning-rate schedule, without a peak."""

    lr_schedule: LrSchedule
    """Learning rate after the warm-up: constant, linear, cosine or inverse_sqrt."""
    min_lr_ratio: float = key(FROM_0_TO_1)
    """Final learning rate (inverse_sqrt: lowest) as a share of the peak; unused by constant."""
    warmup_steps: int = key(AT_LEAST_0)
    """Optimizer steps over which the learning rate rises to its peak; 0: no warm-up."""
    weight_decay: float = key(AT_LEAST_0)
    """AdamW's decoupled weight decay, of matrices only; 0: none."""
    beta1: float = key(FROM_0_BELOW_1)
    """AdamW's decay rate of the running mean of gradients."""
    beta2: float = key(FROM_0_BELOW_1)
    """AdamW's decay rate of the running mean of squared gradients."""
    adam_eps: float = key(ABOVE_0)
    """AdamW's epsilon, added to the root of the running mean of squared gradients."""
    max_grad_norm: float = key(AT_LEAST_0)
    """Gradients with a larger norm are scaled down to this norm; 0: never."""


@dataclass(kw_only=True)
class OptimizerConfig(AdamWConfig):
    """AdamW and its learning-rate schedule."""

    lr: float = key(ABOVE_0)
    """Peak learning rate."""


@dataclass(kw_only=True)
class ExamplesConfig(OptimizerConfig):
    """Training on fixed examples: single sequences in sft, pairs of them in reward and dpo."""

    epochs: float = key(ABOVE_0)
    """Passes over the examples of the phase."""
    batch_size: int = key(ROWS)
    """Sequences, or in reward and dpo pairs, per optimizer step, over all ranks."""
    micro_batch_size: int | None = key(ROWS, at_resume=AtResume.rounding)
    """Sequences, or pairs, that a rank runs at once; null: as many sequences as hardware allows."""
    max_tokens: int = key(ABOVE_0)
    """Maximum length in tokens; examples with a longer sequence are skipped and counted."""
    eval_examples: int = key(ABOVE_0)
    """Maximum number of held-out examples to measure perplexity (sft) or accuracy (pairs) on."""
    eval_every: int = key(AT_LEAST_0)
    """Optimizer steps between evaluations; 0: only after training, with sft also before."""


@dataclass(kw_only=True)
class SftConfig(ExamplesConfig):
    """Supervised fine-tuning."""

    loss_on: LossOn
    """Tokens that the loss covers: response (only the responses) or all."""


@dataclass(kw_only=True)
class PairsConfig(ExamplesConfig):
    """Training on pairs of a chosen and a rejected response."""

    label_smoothing: float = key(FROM_0_BELOW_HALF)
    """Share of pairs whose label is assumed to be wrong; 0: none."""
    label_noise: float = key(FROM_0_TO_1)
    """Share of training pairs whose answers are exchanged, to study wrong labels; 0: none."""


def phases_that_combine(config: Any) -> frozenset[Phase]:
    """Return the phases that read reward.combine: training only distinguishes warm."""
    trains = {Phase.reward} if config.reward.combine is CombineName.warm else set()
    return frozenset({Phase.ppo, *trains})


SHARED_LAYERS = 4  # a member has one of so many layers as its own, the others are shared
SINGLE = (
    Unread(
        lambda reward: reward.members == 1,
        "{group}.members=1 trains a single model",
        "add {group}.members=5",
    ),
)
UNWEIGHTED = (
    Unread(
        lambda reward: reward.combine is not CombineName.uncertainty,
        "{group}.combine does not weigh the variance",
        "add {group}.combine=uncertainty",
    ),
)


@dataclass(kw_only=True)
class RewardConfig(PairsConfig):
    """Reward model training."""

    loss: RewardLossName
    """end: on the end scores (InstructGPT); from_divergence: on all differing tokens; regression:
    squared error of both end scores, whose right values are in ``score_columns``."""
    margin_column: str | None
    """Column with the margin by which the chosen score should be higher (Llama 2); null: none."""
    score_columns: list[str] | None
    """Columns with the scores of the chosen and of the rejected response, for loss=regression."""
    group_pairs: bool
    """Keep all pairs of one prompt in one batch, each prompt with weight 1 (InstructGPT)."""
    members: int = key(ABOVE_0, affects=results_of(Phase.reward, Phase.ppo), is_inherited=True)
    """Reward models of the ensemble: the first is trained whole, the others on its layers."""
    member_layers: int | None = key(
        ABOVE_0, affects=results_of(Phase.reward, Phase.ppo), is_inherited=True, unread=SINGLE
    )
    """Top layers that each further member has as its own; null: a quarter of all, at least one."""
    member_epochs: float = key(ABOVE_0, unread=SINGLE)
    """Passes over the pairs in which the further members learn, after those of the first."""
    reweight_pairs: bool = key(unread=SINGLE)
    """Each further member draws its own weight of each pair in its loss (Bayesian bootstrap)."""
    combine: CombineName = key(affects=phases_that_combine, is_inherited=False, unread=SINGLE)
    """Score of a response: mean, worst or uncertainty (mean minus variance) of the members'
    scores; warm: the score of one model with the mean of the members' weights."""
    uncertainty_coef: float = key(
        AT_LEAST_0, affects=results_of(Phase.ppo), is_inherited=False, unread=UNWEIGHTED
    )
    """Factor of the variance over the members, for combine=uncertainty."""
    groups_path: str | None
    """JSON Lines file of held-out pairs with a column ``group``; null: none."""

    @property
    def reads_numbers(self) -> bool:
        """Return True if the loss reads numbers of each pair."""
        return self.margin_column is not None or self.score_columns is not None

    def num_own_layers(self, total: int) -> int:
        """Return the number of a member's own layers in a model of ``total`` layers."""
        return self.member_layers or max(1, total // SHARED_LAYERS)


@dataclass(kw_only=True)
class DpoConfig(PairsConfig):
    """Direct preference optimisation, instead of reward model training and PPO."""

    loss: DpoLossName
    """sigmoid: DPO's logistic loss; ipo: a squared loss, which bounds the pull of a single pair."""
    beta: float = key(ABOVE_0)
    """Strength of the pull to the reference; the implicit reward is beta * log(pi / pi_ref)."""
    eval_prompts: int = key(ABOVE_0)
    """Maximum number of held-out prompts to answer before and after training."""
