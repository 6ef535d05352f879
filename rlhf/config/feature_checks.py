"""Rules between the keys of PPO, of LoRA and of ZeRO."""

from __future__ import annotations

from rlhf.config.choices import (
    AdvantageEstimator,
    Backend,
    KlEstimator,
    KlPlacement,
    LoraExport,
    LoraRole,
    ModelInit,
    Moments,
    Phase,
    TrainingEngine,
    When,
)
from rlhf.config.hybrid_checks import check_hybrid_engine
from rlhf.config.machine_schema import ZeroConfig
from rlhf.config.ppo_schema import COMPARING, PpoConfig
from rlhf.config.schema import RunConfig
from rlhf.config.zero_checks import check_extra, check_nvme, check_quantized, check_sharded_keys
from rlhf.errors import ConfigError

ROUGH_BETA2 = 0.99  # beyond, a step changes a second moment by less than bf16 rounds


def check_ppo(ppo: PpoConfig, *, lora_rank: int) -> None:
    """Features of PPO that need, or exclude, one another."""
    if ppo.steps is None and ppo.epochs is None:
        raise ConfigError("ppo.steps and ppo.epochs are both null: set one, or both, as caps")
    estimator = ppo.advantage_estimator
    if estimator in COMPARING and ppo.responses_per_prompt == 1:
        raise ConfigError(
            f"ppo.advantage_estimator={estimator} compares the responses of one prompt, and "
            "ppo.responses_per_prompt=1; use 2 or more"
        )
    if estimator in COMPARING and ppo.whiten_rewards:
        raise ConfigError(
            f"ppo.whiten_rewards=true: {estimator} compares whole responses, not tokens; "
            "set ppo.whiten_rewards=false"
        )
    if ppo.kl_placement is KlPlacement.loss and ppo.kl_estimator is KlEstimator.k1:
        raise ConfigError(
            "ppo.kl_estimator=k1 with ppo.kl_placement=loss: its gradient is 0 on average; "
            "use ppo.kl_estimator=k3, or k2"
        )
    if ppo.kl_target is not None and ppo.rollout_batch_size >= 5 * ppo.kl_horizon:
        raise ConfigError(
            f"ppo.kl_horizon={ppo.kl_horizon}: with ppo.kl_target it must be above a fifth of "
            f"ppo.rollout_batch_size={ppo.rollout_batch_size}, or ppo.kl_ctl could fall below 0; "
            f"use {ppo.rollout_batch_size // 5 + 1} or more"
        )
    if estimator is not AdvantageEstimator.gae:
        _refuse_critic_keys(ppo)
    if ppo.steps is not None and ppo.actor_freeze_steps >= ppo.steps:
        raise ConfigError(
            f"ppo.actor_freeze_steps={ppo.actor_freeze_steps}: the actor must learn in some of "
            f"ppo.steps={ppo.steps}; use less"
        )
    _check_trunk(ppo, lora_rank=lora_rank)


def _refuse_critic_keys(ppo: PpoConfig) -> None:
    given = {
        "ppo.actor_freeze_steps": ppo.actor_freeze_steps,
        "ppo.shared_trunk": ppo.shared_trunk,
    }
    for key, value in given.items():
        if value:
            raise ConfigError(
                f"{key}={str(value).lower()}: ppo.advantage_estimator={ppo.advantage_estimator} "
                "has no critic; leave it out, or use ppo.advantage_estimator=gae"
            )


def _check_trunk(ppo: PpoConfig, *, lora_rank: int) -> None:
    if not ppo.shared_trunk:
        for key, value in (
            ("num_layers_unfrozen", ppo.num_layers_unfrozen),
            ("num_value_layers", ppo.num_value_layers),
        ):
            if value:
                raise ConfigError(f"ppo.{key}={value}: it belongs to ppo.shared_trunk=true")
        return
    if ppo.num_layers_unfrozen is None:
        raise ConfigError(
            "ppo.num_layers_unfrozen is null: with ppo.shared_trunk=true it says how many top "
            "layers are trained; 2 is trlx's choice"
        )
    if lora_rank:
        raise ConfigError(
            "ppo.shared_trunk=true with adapters: the reference is a copy of frozen top layers, "
            "and adapters below would change it; use lora=none, or ppo.shared_trunk=false (with "
            "LoRA the reference is the actor itself)"
        )
    if ppo.actor_freeze_steps:
        raise ConfigError(
            f"ppo.actor_freeze_steps={ppo.actor_freeze_steps}: actor and critic of a shared trunk "
            "take one step together; set it to 0, or ppo.shared_trunk=false"
        )


def check_rollout(config: RunConfig) -> None:
    """Refuse settings of the rollout that its backend cannot follow, or that end every response."""
    rollout = config.rollout
    if "" in rollout.stop:
        raise ConfigError(
            f"rollout.stop={rollout.stop}: an empty text would end every response at its first "
            "token; remove it from the list"
        )
    if rollout.reuse_logprobs is When.always and rollout.backend is not Backend.fast:
        raise ConfigError(
            f"rollout.reuse_logprobs=always with rollout.backend={rollout.backend}: generate "
            "measures no log-probabilities; use rollout.backend=fast, or "
            "rollout.reuse_logprobs=auto"
        )
    check_hybrid_engine(config)


def check_lora(config: RunConfig) -> None:
    """Adapters sit on models that have learned something."""
    lora = config.lora
    if not lora.rank:
        return
    if not lora.roles:
        raise ConfigError(
            f"lora.roles=[] with lora.rank={lora.rank}: name the models that get adapters, "
            f"some of {', '.join(LoraRole)}"
        )
    if lora.train_rest and lora.export is LoraExport.adapter:
        raise ConfigError(
            "lora.export=adapter with lora.train_rest=true: what else has learned would be lost; "
            "use lora.export=merged"
        )
    first = {"sft": ("model", config.model), "reward": ("reward_model", config.reward_model)}
    for phase, (key, model) in first.items():
        starts_random = phase in config.phase.order and model.init is ModelInit.random
        if starts_random and phase in lora.roles:
            raise ConfigError(
                f"lora.roles has {phase}, and {key}.init=random: adapters on random weights learn "
                "nothing; use lora.roles=[actor,critic], or a pretrained model"
            )


def check_zero(config: RunConfig) -> None:
    """What the stages can do, and what the machine must have for it."""
    zero = config.zero
    if zero.offload_optimizer and zero.stage == 0:
        raise ConfigError("zero.offload_optimizer=true: it needs zero.stage=1, 2 or 3")
    check_extra(zero)
    check_sharded_keys(zero)
    check_nvme(config)
    check_quantized(config)
    if zero.offload_ema and not config.ppo.ema_beta:
        raise ConfigError(
            f"zero.offload_ema=true with ppo.ema_beta={config.ppo.ema_beta}: there is no moving "
            "average; add ppo.ema_beta=0.992, or leave zero.offload_ema out"
        )
    if config.hardware.ranks_per_node % zero.hpz_partition_size:
        raise ConfigError(
            f"zero.hpz_partition_size={zero.hpz_partition_size} does not divide "
            f"hardware.ranks_per_node={config.hardware.ranks_per_node}"
        )


def torch_obstacle(zero: ZeroConfig, *, ranks: int) -> str | None:
    """What of a run plain torch cannot do, as key=value; None: nothing."""
    for key in (
        "offload_optimizer",
        "offload_parameters",
        "offload_reference",
        "offload_reward",
        "quantize_weights",
        "quantize_gradients",
        "quantize_frozen_weights",
    ):
        if getattr(zero, key):
            return f"zero.{key}=true"
    if zero.hpz_partition_size > 1:
        return f"zero.hpz_partition_size={zero.hpz_partition_size}"
    if zero.extra:
        return f"zero.extra={zero.extra}"
    return f"hardware.nodes*hardware.ranks_per_node={ranks}" if ranks > 1 else None


def check_engine(config: RunConfig) -> None:
    """The engine can do what is asked; what depends on the precision shows when it is built."""
    zero = config.zero
    ranks = config.hardware.nodes * config.hardware.ranks_per_node
    obstacle = torch_obstacle(zero, ranks=ranks)
    if zero.engine is TrainingEngine.torch and obstacle is not None:
        raise ConfigError(
            f"zero.engine=torch with {obstacle}: it runs one rank without offloading; "
            "use zero.engine=auto"
        )
    if zero.moments is Moments.bf16:
        _check_half_moments(config, obstacle)


def _check_half_moments(config: RunConfig, obstacle: str | None) -> None:
    zero = config.zero
    if zero.engine is TrainingEngine.deepspeed:
        obstacle = "zero.engine=deepspeed"
    if obstacle is not None:
        raise ConfigError(
            f"zero.moments=bf16 with {obstacle}: only zero.engine=torch keeps such moments; "
            "use zero.moments=fp32, or leave that out"
        )
    for key, stage in (("stage", zero.stage), ("critic_stage", zero.critic_stage)):
        if stage == 0:
            raise ConfigError(
                f"zero.moments=bf16 with zero.{key}=0: weights and moments are fp32 there; "
                "use zero=stage1, which costs nothing on one rank, or zero.moments=fp32"
            )
    trained = {
        Phase.sft: {"sft.beta2": config.sft.beta2},
        Phase.reward: {"reward.beta2": config.reward.beta2},
        Phase.dpo: {"dpo.beta2": config.dpo.beta2},
        Phase.ppo: {
            "ppo.beta2": config.ppo.beta2,
            "ppo.critic_beta2": config.ppo.critic_beta2 or 0.0,
        },
    }
    for phase in config.phase.order:
        for key, beta2 in trained[phase].items():
            if beta2 > ROUGH_BETA2:
                raise ConfigError(
                    f"{key}={beta2} with zero.moments=bf16: steps of the second moment would be "
                    f"lost to rounding; use {key}={ROUGH_BETA2} or less, or zero.moments=fp32"
                )
