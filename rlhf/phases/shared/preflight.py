"""Checks of rollouts and data before any model is built, so that no phase runs in vain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlhf.base.errors import CapabilityError, ConfigError
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.data.pair_numbers import read_pair_groups
from rlhf.data.phase_needs import (
    PhaseExamples,
    describe_phase_examples,
    require_corpus,
    require_examples,
)
from rlhf.data.splits import phase_answered_by_dpo
from rlhf.engine.deepspeed_engine import op_unavailable_reason, require_quantizer
from rlhf.options import Backend
from rlhf.options.hybrid_engine.hybrid_rollout import hybrid_engine_unavailable_reason
from rlhf.options.hybrid_engine.supported_models import model_unsupported_reason
from rlhf.options.lora.keys import LoraRole
from rlhf.options.vllm.vllm_server import VllmClient
from rlhf.phases.shared.context import RunContext, phase_prompts, phase_tokens, reward_pairs
from rlhf.phases.shared.model_checks import config_of, require_decoder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def require_support(config: RunConfig) -> None:
    """Check that this machine, the packages and the model support rollouts and quantization.

    Raises:
        CapabilityError: if they do not; the message names the reason and what works.
        ConfigError: if rollout.backend=hybrid_engine is combined with the DPO phase.
        RolloutError: if the server of rollout.backend=vllm_server cannot be used.
    """
    require_quantizer(config.zero)
    if not {Phase.ppo, Phase.dpo} & set(config.phase.order):
        return
    hybrid = config.rollout.backend in {Backend.hybrid_engine, Backend.vllm_server}
    model = config_of("model", config.model) if hybrid else None
    if config.rollout.backend is Backend.hybrid_engine:
        if Phase.dpo in config.phase.order:
            raise ConfigError(
                "rollout.backend=hybrid_engine with the dpo phase: only PPO's actor has the "
                "Hybrid Engine; use rollout=fast"
            )
        if config.lora.rank and LoraRole.actor in config.lora.roles:
            # Checked here, so that plan=only accepts DeepSpeed-Chat's recipes, which have both.
            raise CapabilityError(
                f"rollout.backend=hybrid_engine with lora.rank={config.lora.rank} on the actor: "
                "the Hybrid Engine's layers read only the base weights and would "
                "generate without the adapters; use rollout=fast, which merges adapters for each "
                "rollout, or lora=none"
            )
        tensor_parallel = config.rollout.hybrid_engine.inference_tp_size
        obstacle = hybrid_engine_unavailable_reason(tensor_parallel=tensor_parallel)
        obstacle = obstacle or op_unavailable_reason("InferenceBuilder")
        if obstacle is None and model is not None:
            obstacle = _add_model_type(model, model_unsupported_reason(model))
        if obstacle is not None:
            raise CapabilityError(f"rollout.backend=hybrid_engine: {obstacle}; use rollout=fast")
    if config.rollout.backend is Backend.vllm_server:
        server = config.rollout.server
        ties = model is not None and model.tie_word_embeddings
        VllmClient(server.url, timeout=server.timeout_seconds).check(ties_embeddings=ties)
    require_decoder(config, config.phase.order)


def require_data(context: RunContext, phases: Iterable[Phase]) -> None:
    """Check that each phase has a batch to train on, before the first phase is trained.

    It also prints how many examples each phase uses and skips.

    Raises:
        DataError: if a phase has less than one batch, or nothing held out; if pairs lack numbers
            that a loss reads, or have no groups; or no corpus is found.
        ConfigError: if PPO's options do not suit the steps that its examples allow.
    """
    found: dict[Phase, PhaseExamples] = {}
    for phase in phases:
        data, answered = phase_tokens(context, phase), 0
        if phase is Phase.dpo:
            answered = len(phase_prompts(context, phase_answered_by_dpo(context.parts)).eval)
        found[phase] = PhaseExamples(len(data.train), len(data.eval), data.left_out, answered)
        context.console.say(describe_phase_examples(phase, found[phase]))
    require_examples(context.config, found)
    if Phase.reward in found:
        read_pair_groups(context.config.reward.groups_path)
        if context.config.reward.reads_numbers:
            reward_pairs(context)
    if Phase.ppo in found:
        require_corpus(context.config.ppo, context.config.data, seed=context.config.seed)


def _add_model_type(config: PreTrainedConfig, obstacle: str | None) -> str | None:
    if obstacle is None:
        return None
    return f"a model of model_type={config.model_type} {obstacle}"
