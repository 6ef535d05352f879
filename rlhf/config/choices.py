"""The words that a configuration may choose from."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """The three steps of InstructGPT, and the one that can take the place of the last two."""

    sft = "sft"
    reward = "reward"
    ppo = "ppo"
    dpo = "dpo"


SPLIT_PHASES = (Phase.sft, Phase.reward, Phase.ppo)  # those that data.split names


class ModelInit(StrEnum):
    """Where a model's first weights come from; ``gold`` is no model but the judge of the task."""

    pretrained = "pretrained"
    random = "random"
    sft = "sft"
    gold = "gold"

    @property
    def is_of_sft(self) -> bool:
        """True if the reward model, or the critic beside a judge, starts from the SFT model."""
        return self in (ModelInit.sft, ModelInit.gold)


class Device(StrEnum):
    """What the ranks compute on."""

    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    """Precision of the weights; masters and optimiser states are fp32 in every case."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Source(StrEnum):
    """Where examples come from."""

    synthetic = "synthetic"
    local = "local"
    hub = "hub"


class LossOn(StrEnum):
    """Which tokens supervised fine-tuning learns to predict."""

    response = "response"
    all = "all"


class RewardLoss(StrEnum):
    """Pairwise losses of the reward model."""

    end = "end"
    from_divergence = "from_divergence"


class KlEstimator(StrEnum):
    """Estimators of KL(policy || reference) from one sampled token, http://joschu.net/blog/kl-approx.html."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KlPlacement(StrEnum):
    """Where the KL penalty enters: each token's reward (InstructGPT), or the loss (GRPO)."""

    reward = "reward"
    loss = "loss"


class LossAggregation(StrEnum):
    """How the losses of tokens become that of a mini-batch; the critic's is always per token."""

    token_mean = "token_mean"
    sequence_mean = "sequence_mean"


class DpoLossName(StrEnum):
    """DPO's loss of a pair: logistic (sigmoid), or squared (IPO)."""

    sigmoid = "sigmoid"
    ipo = "ipo"


class AdvantageEstimator(StrEnum):
    """How advantages are made; only gae needs a critic."""

    gae = "gae"
    rloo = "rloo"
    grpo = "grpo"
    reinforce_pp = "reinforce_pp"


class ScaleReward(StrEnum):
    """What scores are divided by: nothing, their running deviation, or that of a reference."""

    none = "none"
    running = "running"
    reference = "reference"


class LrSchedule(StrEnum):
    """Shape of the learning rate after its warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    inverse_sqrt = "inverse_sqrt"


class LoraRole(StrEnum):
    """Models that can get adapters; DPO's policy is an actor."""

    sft = "sft"
    reward = "reward"
    actor = "actor"
    critic = "critic"


class LoraExport(StrEnum):
    """What a model with adapters is saved as."""

    merged = "merged"
    adapter = "adapter"


class Template(StrEnum):
    """How conversations become text: Human/Assistant turns, or the tokenizer's chat template."""

    plain = "plain"
    chat = "chat"


class Backend(StrEnum):
    """What samples the responses."""

    fast = "fast"
    hf = "hf"
    hybrid_engine = "hybrid_engine"


class When(StrEnum):
    """Whether something is done; auto: where it pays."""

    auto = "auto"
    always = "always"
    never = "never"


class TrainingEngine(StrEnum):
    """What runs and trains a model."""

    auto = "auto"
    torch = "torch"
    deepspeed = "deepspeed"


class Moments(StrEnum):
    """Precision of AdamW's moments."""

    fp32 = "fp32"
    bf16 = "bf16"


class PlanMode(StrEnum):
    """What the plan of memory, time and cost is for."""

    check = "check"
    only = "only"
    off = "off"


class WandbMode(StrEnum):
    """How Weights & Biases takes the metrics."""

    disabled = "disabled"
    online = "online"
    offline = "offline"
