"""Enums: the values that a config key can have if it is one of a few words."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """The three steps of InstructGPT, and dpo, which can replace reward and ppo."""

    sft = "sft"
    reward = "reward"
    ppo = "ppo"
    dpo = "dpo"

    @property
    def data_share(self) -> Phase:
        """Return the phase of ``SPLIT_PHASES`` whose records this phase uses."""
        return Phase.reward if self is Phase.dpo else self

    @property
    def learns_from_pairs(self) -> bool:
        """Return True if an example of the phase is a pair of sequences."""
        return self.data_share is Phase.reward


SPLIT_PHASES = (Phase.sft, Phase.reward, Phase.ppo)  # in the order of data.split


class ModelInit(StrEnum):
    """Origins of initial weights; ``gold`` is the synthetic task's judge, which is not a model."""

    pretrained = "pretrained"
    random = "random"
    sft = "sft"
    gold = "gold"

    @property
    def starts_from_sft(self) -> bool:
        """Return True if the reward model, or for gold the critic, starts from the SFT model."""
        return self in (ModelInit.sft, ModelInit.gold)


class RewardKind(StrEnum):
    """Kinds of parts of the score: reward model, judge, function, HTTP server, then fixed rules."""

    model = "model"
    gold = "gold"
    environment = "environment"
    function = "function"
    http = "http"
    length = "length"
    stop = "stop"
    pattern = "pattern"
    exact = "exact"
    number = "number"
    json = "json"


class Device(StrEnum):
    """Devices of the ranks."""

    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    """Precisions of the weights; master weights are always fp32."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class OnOom(StrEnum):
    """What a run does if a phase runs out of memory."""

    stop = "stop"
    reduce_micro_batch = "reduce_micro_batch"


class Source(StrEnum):
    """Sources of examples: the generated task, local files, or the Hugging Face hub."""

    synthetic = "synthetic"
    environment = "environment"
    local = "local"
    hub = "hub"


class LossOn(StrEnum):
    """Tokens that the loss of supervised fine-tuning covers."""

    response = "response"
    all = "all"


class RewardLossName(StrEnum):
    """Losses of the reward model: on end scores, on all differing tokens, or on given scores."""

    end = "end"
    from_divergence = "from_divergence"
    regression = "regression"


class KlEstimator(StrEnum):
    """Estimators of KL(policy || reference) from one sampled token.

    http://joschu.net/blog/kl-approx.html; the formulas are in rlhf/algorithms/kl.py.
    """

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KlPlacement(StrEnum):
    """Places of the KL penalty: the token's reward, the loss, or only the token's own advantage."""

    reward = "reward"
    loss = "loss"
    advantage = "advantage"


class DpoLossName(StrEnum):
    """Losses of DPO: logistic (sigmoid) or squared (ipo)."""

    sigmoid = "sigmoid"
    ipo = "ipo"


class AdvantageEstimator(StrEnum):
    """Estimators of advantages (docs/algorithms.md); only gae needs a critic."""

    gae = "gae"
    rloo = "rloo"
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    reinforce_pp = "reinforce_pp"


class ScaleReward(StrEnum):
    """Divisors of scores: none, their running standard deviation, or a fixed reference value."""

    none = "none"
    running = "running"
    reference = "reference"


class LrSchedule(StrEnum):
    """Shapes of the learning rate after its warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    inverse_sqrt = "inverse_sqrt"


class Template(StrEnum):
    """Formats of conversations: Human/Assistant turns, or the tokenizer's chat template."""

    auto = "auto"
    plain = "plain"
    chat = "chat"


class When(StrEnum):
    """When an option is used; the text of each key explains its rule for ``auto``."""

    auto = "auto"
    always = "always"
    never = "never"


class TrainingEngine(StrEnum):
    """Engines that run and train a model."""

    auto = "auto"
    torch = "torch"
    deepspeed = "deepspeed"


class MomentsDtype(StrEnum):
    """Precisions of AdamW's moments."""

    fp32 = "fp32"
    bf16 = "bf16"


class PlanMode(StrEnum):
    """Uses of the plan of memory, time and cost: refuse runs that do not fit, only print, none."""

    check = "check"
    only = "only"
    off = "off"


class WandbMode(StrEnum):
    """Modes of Weights & Biases."""

    disabled = "disabled"
    online = "online"
    offline = "offline"
