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


class EnvironmentKind(StrEnum):
    """Environments; none: single responses."""

    none = "none"
    number_guessing = "number_guessing"
    calculator = "calculator"
    blackjack = "blackjack"
    gymnasium = "gymnasium"
    textarena = "textarena"
    reasoning_gym = "reasoning_gym"
    gem = "gem"
    tools = "tools"
    custom = "custom"


class FailureName(StrEnum):
    """What can go wrong in an episode: faults of the environment, then of the policy."""

    timeout = "timeout"  # a step took longer than environment.step_seconds
    exception = "exception"  # the environment raised an error
    died = "died"  # its process ended
    invalid = "invalid"  # it returned something else than a step, or a reward that is no number
    malformed = "malformed"  # the policy's turn could not be read; the episode goes on
    cut_turn = "cut_turn"  # the policy's turn reached its token limit; the episode goes on
    too_long = "too_long"  # the next observation does not fit; the episode is cut


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


class CombineName(StrEnum):
    """Ways to make one score of the members of a reward model; warm averages their weights."""

    mean = "mean"
    worst = "worst"
    uncertainty = "uncertainty"
    warm = "warm"


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


class GaeUnit(StrEnum):
    """Time steps of generalised advantage estimation."""

    token = "token"
    turn = "turn"


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


class LoraRole(StrEnum):
    """Models that can get adapters; the policy of DPO counts as actor."""

    sft = "sft"
    reward = "reward"
    actor = "actor"
    critic = "critic"


class LoraExport(StrEnum):
    """Forms in which a model with adapters is saved."""

    merged = "merged"
    adapter = "adapter"


class Template(StrEnum):
    """Formats of conversations: Human/Assistant turns, or the tokenizer's chat template."""

    auto = "auto"
    plain = "plain"
    chat = "chat"


class Backend(StrEnum):
    """Programs that sample responses: ours, generate, DeepSpeed's Hybrid Engine, a vLLM server."""

    fast = "fast"
    hf = "hf"
    hybrid_engine = "hybrid_engine"
    vllm_server = "vllm_server"


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


class Reuse(StrEnum):
    """Which runs reuse finished phases with equal inputs, from the store of phases."""

    sweep = "sweep"
    always = "always"
    never = "never"


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
