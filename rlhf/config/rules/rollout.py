"""Rules for the config group ``rollout``, and for keys that DeepSpeed's Hybrid Engine excludes."""

from __future__ import annotations

from rlhf.base.errors import ConfigError, refuse_first
from rlhf.config.choices import Device, MomentsDtype, TrainingEngine, When
from rlhf.config.roles import SHARDED_WEIGHTS
from rlhf.config.schema.run import RunConfig
from rlhf.options import Backend, PpoConfig, RolloutConfig
from rlhf.options.corrections.keys import ProximalPolicy, RolloutCorrection

BACKEND = "rollout.backend=hybrid_engine"
OPTIMIZER_STAGE = 2


def check_rollout(config: RunConfig) -> None:
    """Check that the backend supports the settings, and that no stop text is empty."""
    rollout = config.rollout
    broken = {
        f"rollout.stop={rollout.stop}: an empty text would end every response at its first token; "
        "remove the empty text from the list": "" in rollout.stop,
        f"rollout.reuse_logprobs=always with rollout.backend={rollout.backend}: only "
        "rollout.backend=fast measures log-probabilities; use rollout.backend=fast, or "
        "rollout.reuse_logprobs=auto": (
            rollout.reuse_logprobs is When.always and rollout.backend is not Backend.fast
        ),
    }
    refuse_first(broken)
    _check_lag(rollout, config.ppo)
    _check_correction(config)
    check_hybrid_engine(config)


def _check_lag(rollout: RolloutConfig, ppo: PpoConfig) -> None:
    """Check that rollouts of older weights, and sampling beside training, can be had."""
    rows, lag = ppo.rollout_batch_size, rollout.lag
    broken = {
        f"rollout.lag={lag} with rollout.backend={rollout.backend}: the log-probs of the weights "
        "that sampled are needed later, and this backend measures none; use rollout=fast, or "
        "rollout.lag=0": lag > 0 and rollout.backend not in (Backend.fast, Backend.vllm_server),
        f"ppo.resampling_rounds={ppo.resampling_rounds} with rollout.lag={lag}: prompts are "
        "replaced when their responses are scored, and a lag samples these steps before; use "
        "rollout.lag=0, or ppo.resampling_rounds=0": lag > 0 and ppo.resampling_rounds > 0,
    }
    refuse_first(broken)
    if not rollout.overlap:
        return
    reasons = {
        "rollout.lag=0: each step then waits for the weights of the last; use rollout.lag=1": (
            lag == 0
        ),
        f"rollout.samplers={rollout.samplers} and rollout.backend=vllm_server: the server has the "
        "weights of one rollout at a time, so one process sends them; use rollout.samplers=1": (
            rollout.samplers > 1 and rollout.backend is Backend.vllm_server
        ),
        "ppo.shared_trunk=true: the policy is a branch of the trunk; use ppo.shared_trunk=false": (
            ppo.shared_trunk
        ),
        f"rollout.samplers={rollout.samplers} does not divide ppo.rollout_batch_size={rows}: each "
        "process samples an equal share; use a divisor": rows % rollout.samplers != 0,
    }
    refuse_first(reasons, "rollout.overlap=true with ")


def _check_correction(config: RunConfig) -> None:
    """Check that rollouts have comparable sampling probabilities if ppo.rollout_correction is set.

    With top-k or top-p a server returns probabilities over the remaining tokens only, but training
    computes them over all tokens: their ratio would not be an importance weight.
    """
    rollout, correction = config.rollout, config.ppo.rollout_correction
    interpolates = config.ppo.proximal_policy is ProximalPolicy.interpolated
    if interpolates:
        _check_interpolation(config.ppo, rollout)
    if correction is RolloutCorrection.none:
        return
    reasons = {
        f"rollout.backend={rollout.backend} measures no log-probabilities; use rollout=fast or "
        "rollout=vllm_server": rollout.backend not in (Backend.fast, Backend.vllm_server),
        "rollout.reuse_logprobs=always trains on the rollout's own log-probabilities, so that all "
        "weights are 1; use rollout.reuse_logprobs=auto": (
            rollout.reuse_logprobs is When.always and not interpolates
        ),
        f"rollout.top_p={rollout.top_p} changes what the probabilities mean; use rollout.top_p=1": (
            rollout.top_p < 1
        ),
        f"rollout.top_k={rollout.top_k} changes what the probabilities mean; use rollout.top_k=0": (
            rollout.top_k > 0
        ),
    }
    refuse_first(reasons, f"ppo.rollout_correction={correction}: ")


def _check_interpolation(ppo: PpoConfig, rollout: RolloutConfig) -> None:
    """Check that nothing needs the policy at the step's start, which A-3PO never runs.

    Its weights must be used, since they correct for the policy that it interpolates with.
    """
    reasons = {
        "ppo.rollout_correction=none: the weights of A-3PO would be missing; use "
        "ppo.rollout_correction=token": ppo.rollout_correction is RolloutCorrection.none,
        "rollout.reuse_logprobs=never: the policy at the step's start is not used; use "
        "rollout.reuse_logprobs=auto": rollout.reuse_logprobs is When.never,
        "ppo.rollout_correction_control=true: the weights change with each update; use "
        "ppo.proximal_policy=step_start": ppo.rollout_correction_control,
        f"ppo.stop_update_kl={ppo.stop_update_kl}: the proximal policy moves with the policy; "
        "remove ppo.stop_update_kl": ppo.stop_update_kl is not None,
        f"ppo.lr_guard_kl={ppo.lr_guard_kl}: the proximal policy moves with the policy; remove "
        "ppo.lr_guard_kl": ppo.lr_guard_kl is not None,
    }
    refuse_first(reasons, "ppo.proximal_policy=interpolated with ")


def check_hybrid_engine(config: RunConfig) -> None:
    """Check that the other keys allow rollout.backend=hybrid_engine, if it is set."""
    if config.rollout.backend is not Backend.hybrid_engine:
        return
    _check_hybrid_prerequisites(config)
    _check_tensor_parallelism(config)
    _check_cuda_graphs(config)
    rollout = config.rollout
    wanted = rollout.max_prompt_tokens + rollout.max_response_tokens
    tokens = rollout.hybrid_engine.max_out_tokens
    if tokens is not None and tokens < wanted:
        raise ConfigError(
            f"rollout.hybrid_engine.max_out_tokens={tokens}: the KV cache must hold "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens={wanted}; use null, which "
            f"means {wanted}, or a number of {wanted} or more"
        )


def _check_hybrid_prerequisites(config: RunConfig) -> None:
    zero, device = config.zero, config.hardware.device
    critic_stage = zero.stage if zero.critic_stage is None else zero.critic_stage
    broken = {
        f"hardware.device={device}: DeepSpeed's kernels run on GPUs only; use rollout=fast, or a "
        "GPU profile of hardware": device is not Device.cuda,
        "zero.engine=torch: the Hybrid Engine is part of DeepSpeed; use zero.engine=auto, which "
        "then runs the actor on DeepSpeed, or rollout=fast": zero.engine is TrainingEngine.torch,
        "zero.moments=bf16: only zero.engine=torch supports bf16 moments, and the actor's engine "
        "is DeepSpeed; use zero.moments=fp32, or rollout=fast": zero.moments is MomentsDtype.bf16,
        "zero.offload_optimizer=true and stage 2 of both actor and critic: DeepSpeed-Chat found "
        "this training unstable and refuses it; use zero.stage=3, zero.critic_stage=3 or "
        "zero.offload_optimizer=false": (
            zero.offload_optimizer and zero.stage == critic_stage == OPTIMIZER_STAGE
        ),
        "ppo.shared_trunk=true: the Hybrid Engine replaces the actor's layers, and the critic and "
        "the reference use the layers of the shared trunk too; use rollout=fast, or "
        "ppo.shared_trunk=false": config.ppo.shared_trunk,
    }
    refuse_first(broken, f"{BACKEND} with ")


def _check_tensor_parallelism(config: RunConfig) -> None:
    size = config.rollout.hybrid_engine.inference_tp_size
    if size == 1:
        return
    zero, per_node = config.zero, config.hardware.ranks_per_node
    broken = {
        # With zero.auto the planner checks this for every stage that it considers.
        f"with zero.stage={zero.stage}: ranks share the weights of generation at zero.stage=3 "
        "only; use zero.stage=3, or rollout.hybrid_engine.inference_tp_size=1": (
            zero.stage != SHARDED_WEIGHTS and not zero.auto
        ),
        f"does not divide hardware.ranks_per_node={per_node}: the ranks that share weights must be "
        "on one node; use a divisor of the ranks per node, e.g. 1": per_node % size > 0,
    }
    refuse_first(broken, f"rollout.hybrid_engine.inference_tp_size={size} ")


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
