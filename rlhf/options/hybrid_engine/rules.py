"""Rules for keys that DeepSpeed's Hybrid Engine needs, and for keys that it excludes."""

from __future__ import annotations

from rlhf.base.errors import ConfigError, refuse_broken_rule
from rlhf.config.choices import Device, MomentsDtype, TrainingEngine
from rlhf.config.roles import SHARDED_WEIGHTS
from rlhf.config.schema.keys import ANSWERING_PHASES
from rlhf.config.schema.model import refuse_compile
from rlhf.config.schema.run import RunConfig
from rlhf.options import Backend

BACKEND = "rollout.backend=hybrid_engine"
OPTIMIZER_STAGE = 2


def check_hybrid_engine(config: RunConfig) -> None:
    """Check that the other keys allow rollout.backend=hybrid_engine, if it is set."""
    if config.rollout.backend is not Backend.hybrid_engine:
        return
    refuse_compile(config, f"{BACKEND}, which replaces layers")
    if not ANSWERING_PHASES(config) & set(config.phase.order):
        return
    _check_prerequisites(config)
    _check_tensor_parallelism(config)
    _check_cuda_graphs(config)
    rollout = config.rollout
    needed = rollout.max_prompt_tokens + rollout.max_response_tokens
    tokens = rollout.hybrid_engine.max_out_tokens
    if tokens is not None and tokens < needed:
        raise ConfigError(
            f"rollout.hybrid_engine.max_out_tokens={tokens}: the KV cache must hold "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens={needed}; use null, which "
            f"means {needed}, or a number of {needed} or more"
        )


def _check_prerequisites(config: RunConfig) -> None:
    zero, device = config.zero, config.hardware.device
    critic_stage = zero.stage if zero.critic_stage is None else zero.critic_stage
    broken = {
        f"hardware.device={device}: DeepSpeed's kernels run on GPUs only; use rollout=fast, or a "
        "GPU hardware profile": device is not Device.cuda,
        "zero.engine=torch: the Hybrid Engine is part of DeepSpeed; use zero.engine=auto, which "
        "then runs the actor on DeepSpeed, or rollout=fast": zero.engine is TrainingEngine.torch,
        "zero.moments=bf16: only zero.engine=torch supports bf16 moments, and the actor's engine "
        "is DeepSpeed; use zero.moments=fp32, or rollout=fast": zero.moments is MomentsDtype.bf16,
        "zero.offload_optimizer=true and stage 2 of both actor and critic: DeepSpeed-Chat found "
        "this training unstable and refuses it; use zero.stage=3, zero.critic_stage=3 or "
        "zero.offload_optimizer=false": (
            zero.offload_optimizer and zero.stage == critic_stage == OPTIMIZER_STAGE
        ),
    }
    refuse_broken_rule(broken, f"{BACKEND} with ")


def _check_tensor_parallelism(config: RunConfig) -> None:
    size = config.rollout.hybrid_engine.inference_tp_size
    if size == 1:
        return
    zero, per_node = config.zero, config.hardware.ranks_per_node
    broken = {
        # With zero.auto the planner applies this rule to every stage that it considers.
        f"with zero.stage={zero.stage}: ranks share the weights of generation at zero.stage=3 "
        "only; use zero.stage=3, or rollout.hybrid_engine.inference_tp_size=1": (
            zero.stage != SHARDED_WEIGHTS and not zero.auto
        ),
        f"does not divide hardware.ranks_per_node={per_node}: the ranks that share weights must be "
        "on one node; use a divisor of the ranks per node, e.g. 1": per_node % size > 0,
    }
    refuse_broken_rule(broken, f"rollout.hybrid_engine.inference_tp_size={size} ")


def _check_cuda_graphs(config: RunConfig) -> None:
    engine = config.rollout.hybrid_engine
    if not engine.enable_cuda_graph:
        return
    obstacles = {
        f"zero.stage={SHARDED_WEIGHTS}": config.zero.stage == SHARDED_WEIGHTS,
        "rollout.hybrid_engine.release_inference_cache=true": engine.release_inference_cache,
        f"rollout.hybrid_engine.inference_tp_size={engine.inference_tp_size}": (
            engine.inference_tp_size > 1
        ),
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise ConfigError(
                f"rollout.hybrid_engine.enable_cuda_graph=true with {obstacle}: a CUDA graph "
                f"needs memory at fixed addresses, and {obstacle} changes the addresses; set "
                f"rollout.hybrid_engine.enable_cuda_graph=false, or change {obstacle}"
            )
