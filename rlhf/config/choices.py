"""Enums: the values that a config key can have if it is one of a few words.

An enum whose values are passed as literals is a class, so that type checkers know the values.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """The three steps of InstructGPT, and dpo, which can replace reward and ppo."""

    sft = "sft"
    reward = "reward"
    ppo = "ppo"
    dpo = "dpo"

    @property
    def phase_in_split(self) -> Phase:
        """Return the phase whose share in data.split this phase uses: dpo uses reward's share."""
        return Phase.reward if self is Phase.dpo else self


SPLIT_PHASES = (Phase.sft, Phase.reward, Phase.ppo)  # in the order of data.split


class ModelInit(StrEnum):
    """Origins of initial weights; with ``gold`` there is no model: the task's judge scores."""

    pretrained = "pretrained"
    random = "random"
    sft = "sft"
    gold = "gold"

    @property
    def starts_from_sft(self) -> bool:
        """Return True if the reward model (the critic, for gold) starts from the SFT model."""
        return self in (ModelInit.sft, ModelInit.gold)


RewardKind = StrEnum(
    "RewardKind",
    "model gold environment function http length stop pattern exact number json judge scorer",
)
"""Kinds of parts of the score: models, the environment, the user's code, rules, judges."""

Device = StrEnum("Device", "cpu cuda")
"""Devices of the ranks."""

Dtype = StrEnum("Dtype", "auto bf16 fp16 fp32")
"""Precisions of the weights; master weights are always fp32."""

Kernels = StrEnum("Kernels", "auto checked off")
"""Kernels that a run may use: compared with torch on GPUs, compared everywhere, or none."""

OnOom = StrEnum("OnOom", "stop reduce_micro_batch")
"""Reactions of a run to a phase that runs out of memory."""

Source = StrEnum("Source", "synthetic environment local hub")
"""Sources of examples: the generated task, local files, or the Hugging Face hub."""

LossOn = StrEnum("LossOn", "response all")
"""Tokens that the loss of supervised fine-tuning covers."""

TrainOn = StrEnum("TrainOn", "all last")
"""Answers of a conversation that supervised fine-tuning learns."""

RewardLossName = StrEnum("RewardLossName", "end from_divergence classification regression")
"""Losses of the reward model: on end scores, on all differing tokens, on marks, on given scores."""

PreferenceLossName = StrEnum("PreferenceLossName", "sigmoid ipo")
"""Losses of the dpo phase."""

Unpaired = StrEnum("Unpaired", "marks scores")
"""Feedback on single responses: marks (good or bad), or scores."""


class KlEstimator(StrEnum):
    """Estimators of KL(policy || reference) from one sampled token.

    http://joschu.net/blog/kl-approx.html; the formulas are in rlhf/algorithms/kl.py.
    """

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    k3_ratio = "k3_ratio"


KlPlacement = StrEnum("KlPlacement", "reward loss advantage")
"""Places of the KL penalty: the token's reward, the loss, or only the token's own advantage."""

AdvantageEstimator = StrEnum("AdvantageEstimator", "gae rloo grpo dr_grpo reinforce_pp")
"""Estimators of advantages (docs/algorithms.md); only gae needs a critic."""

ScaleReward = StrEnum("ScaleReward", "none running reference")
"""Divisors of scores: none, their running standard deviation, or a fixed standard deviation."""


class LrSchedule(StrEnum):
    """Shapes of the learning rate after its warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    inverse_sqrt = "inverse_sqrt"


Template = StrEnum("Template", "auto plain chat")
"""Formats of conversations: Human/Assistant turns, or the tokenizer's chat template."""

When = StrEnum("When", "auto always never")
"""When an option is used; the text of each key explains its rule for ``auto``."""

TrainingEngine = StrEnum("TrainingEngine", "auto torch deepspeed")
"""Engines that run and train a model."""

MomentsDtype = StrEnum("MomentsDtype", "fp32 bf16")
"""Precisions of AdamW's moments."""

PlanMode = StrEnum("PlanMode", "check only off")
"""Uses of the plan of memory, time and cost: refuse runs that do not fit, only print, none."""


class WandbMode(StrEnum):
    """Modes of Weights & Biases."""

    disabled = "disabled"
    online = "online"
    offline = "offline"
