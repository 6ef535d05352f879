"""Schema of the config groups ``sft``, ``reward`` and ``dpo``, and of the optimizer they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import (
    LossOn,
    LrSchedule,
    Phase,
    PreferenceLossName,
    RewardLossName,
    Source,
    TrainOn,
    Unpaired,
)
from rlhf.config.schema.keys import (
    ABOVE_0,
    AT_LEAST_0,
    FROM_0_BELOW_1,
    FROM_0_BELOW_HALF,
    FROM_0_TO_1,
    ROWS,
    AtResume,
    Names,
    Unread,
    key,
    needs,
)

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig

FALLING = needs("lr_schedule", "linear", "cosine", "inverse_sqrt")


@dataclass(kw_only=True)
class AdamWConfig:
    """Keys of AdamW and its learning-rate schedule, without the peak learning rate."""

    lr_schedule: LrSchedule
    """Learning rate after the warm-up: constant, linear, cosine or inverse_sqrt."""
    min_lr_ratio: float = key(FROM_0_TO_1, unread=[FALLING])
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
    """Keys of AdamW and its learning-rate schedule, with the peak learning rate."""

    lr: float = key(ABOVE_0)
    """Peak learning rate."""


@dataclass(kw_only=True)
class ExamplesConfig(OptimizerConfig):
    """Keys for training on fixed examples: sequences in sft, otherwise pairs or responses."""

    epochs: float = key(ABOVE_0)
    """Passes over the examples of the phase."""
    batch_size: int = key(ROWS)
    """Sequences (pairs in reward and dpo) per optimizer step, over all ranks."""
    micro_batch_size: int | None = key(ROWS, at_resume=AtResume.rounding)
    """Sequences, or pairs, that a rank runs at once; null: as many sequences as hardware allows."""
    max_tokens: int = key(ABOVE_0)
    """Maximum length in tokens; examples with a longer sequence are skipped and counted."""
    eval_examples: int = key(ABOVE_0)
    """Maximum number of held-out examples to measure perplexity (sft) or accuracy (pairs) on."""
    eval_every: int = key(AT_LEAST_0)
    """Optimizer steps between evaluations; 0: only after training (for sft, also before)."""


@dataclass(kw_only=True)
class SftConfig(ExamplesConfig):
    """Keys for supervised fine-tuning."""

    loss_on: LossOn
    """Tokens that the loss covers: response (only the responses) or all."""
    train_on: TrainOn = key(unread=[needs("loss_on", "response")])
    """Answers of a conversation (messages) to learn: all whose weight is not 0, or the last."""


@dataclass(kw_only=True)
class PairsConfig(ExamplesConfig):
    """Keys for training on pairs of a chosen and a rejected response, or on graded responses."""

    label_smoothing: float = key(FROM_0_BELOW_HALF)
    """Share of pairs whose label is assumed to be wrong; 0: none."""
    label_noise: float = key(FROM_0_TO_1)
    """Share of training pairs whose answers are exchanged, to study wrong labels; 0: none."""


OF_PAIRS = Unread(
    ("loss", "score_columns"),
    lambda loss, columns: columns is None and loss in ("classification", "regression"),
    "use {key}=end",
)


@dataclass(kw_only=True)
class RewardKeys(PairsConfig):
    """Keys for training the reward model."""

    loss: RewardLossName
    """end: on the scores at the end token (InstructGPT); from_divergence: on all differing tokens;
    classification: cross-entropy on good/bad labels of single responses; regression: squared error
    on their scores, or on the scores of pairs in ``score_columns``."""
    margin_column: str | None
    """Column with the margin by which the chosen score should be higher (Llama 2); null: none."""
    score_columns: list[str] | None
    """Columns with the scores of chosen and rejected responses, for loss=regression; null: learn
    single responses with a score."""
    group_pairs: bool = key(unread=[OF_PAIRS])
    """Keep all pairs of one prompt in one batch, each prompt with weight 1 (InstructGPT)."""
    groups_path: str | None = key(names=Names.place)
    """JSON Lines file of held-out pairs with a column ``group``; null: none."""

    @property
    def unpaired(self) -> Unpaired | None:
        """Return the feedback on single responses that the loss reads; None: it reads pairs."""
        if self.loss is RewardLossName.classification:
            return Unpaired.marks
        is_single = self.loss is RewardLossName.regression and self.score_columns is None
        return Unpaired.scores if is_single else None

    @property
    def reads_numeric_columns(self) -> bool:
        """Return True if the loss reads numbers (a margin or scores) from the data columns."""
        return self.margin_column is not None or self.score_columns is not None


def check_reward(config: RunConfig) -> None:
    """Check that the data has reward.loss's columns, and that the loss reads every set key."""
    if Phase.reward not in config.phase.order:
        return
    reward, source, columns = config.reward, config.data.source, config.reward.score_columns
    is_regression = reward.loss is RewardLossName.regression
    is_pairwise = not is_regression and reward.unpaired is None
    is_generated = source in (Source.synthetic, Source.environment)
    key = "label_smoothing" if reward.margin_column is None else "margin_column"
    wanted = [*(columns or ()), *filter(None, [reward.margin_column])]
    broken = {
        f"reward.loss=regression with reward.score_columns={columns}: it needs two columns with "
        "numbers, such as reward.score_columns=[score_chosen,score_rejected]": (
            is_regression and columns is not None and len(columns) != 2  # noqa: PLR2004
        ),
        "reward.loss=regression: data=synthetic and environments have no scores; use data=local "
        "data.path=FILE, or reward.loss=classification": (
            is_regression and columns is None and is_generated
        ),
        f"reward.score_columns={columns}: only reward.loss=regression reads them; add "
        "reward.loss=regression, or use reward.margin_column": (
            columns is not None and not is_regression
        ),
        f"reward.{key}={getattr(reward, key)}: reward.loss={reward.loss} ignores it; remove it, or "
        "use reward.loss=end": (
            not is_pairwise and (reward.margin_column is not None or reward.label_smoothing > 0)
        ),
        f"reward.label_noise={reward.label_noise}: reward.loss={reward.loss} reads grades, not "
        "which answer was preferred; remove it, or use reward.loss=end": (
            not is_pairwise and reward.label_noise > 0
        ),
        f"reward.{'margin_column' if columns is None else 'score_columns'}: data=synthetic and "
        f"environments have no column {''.join(wanted[:1])}; use data=local data.path=FILE": (
            bool(wanted) and is_generated
        ),
    }
    refuse_broken_rule(broken)


@dataclass(kw_only=True)
class DpoConfig(PairsConfig):
    """Keys for direct preference optimisation, instead of reward model training and PPO."""

    loss: PreferenceLossName
    """sigmoid: DPO's logistic loss; ipo: a squared loss, which bounds the pull of a single pair."""
    beta: float = key(ABOVE_0)
    """Strength of the pull toward the reference; the implicit reward is beta * log(pi / pi_ref)."""
    eval_prompts: int = key(ABOVE_0)
    """Maximum number of held-out prompts to answer before and after training."""
