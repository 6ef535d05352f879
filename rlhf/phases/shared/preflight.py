"""Checks of rollouts and data before any model is built, so that no phase runs in vain."""

from __future__ import annotations

from collections.abc import Iterable

from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.data.pair_numbers import read_pair_groups
from rlhf.data.phase_needs import PhaseExamples, describe_phase_examples, require_examples
from rlhf.data.splits import phase_of_dpo_prompts
from rlhf.engine.deepspeed_engine import require_quantizer
from rlhf.options import Backend
from rlhf.phases.shared.context import RunContext, phase_prompts, phase_tokens, reward_pairs
from rlhf.phases.shared.model_checks import find_model_config, require_fast_decoding


def require_capabilities(config: RunConfig) -> None:
    """Check that this machine, the packages and the model support rollouts and quantization.

    Raises:
        CapabilityError: if they do not; the message names the reason and what works.
        ConfigError, RolloutError: if an option's rollout backend cannot be used.
    """
    require_quantizer(config.zero)
    if not {Phase.ppo, Phase.dpo} & set(config.phase.order):
        return
    if config.rollout.backend is Backend.hybrid_engine:
        from rlhf.options.hybrid_engine.hybrid_backend import require_hybrid_engine

        require_hybrid_engine(config, find_model_config("model", config.model))
    elif config.rollout.backend is Backend.vllm_server:
        from rlhf.options.vllm.server_backend import require_server

        require_server(config, find_model_config("model", config.model))
    require_fast_decoding(config, config.phase.order)


def require_data(context: RunContext, phases: Iterable[Phase]) -> None:
    """Check that each phase has a batch to train on, before the first phase is trained.

    The number of examples that each phase uses and skips is printed.

    Raises:
        DataError: if a phase has less than one batch or no held-out example; if pairs lack the
            numbers that a loss reads; if pairs of reward.groups_path have no group; or if an
            option's data is missing.
        ConfigError: if an option does not support the number of steps that the examples allow.
    """
    examples: dict[Phase, PhaseExamples] = {}
    for phase in phases:
        data, answered = phase_tokens(context, phase), 0
        if phase is Phase.dpo:
            answered = len(phase_prompts(context, phase_of_dpo_prompts(context.parts)).eval)
        examples[phase] = PhaseExamples(len(data.train), len(data.eval), data.left_out, answered)
        context.console.say(describe_phase_examples(phase, examples[phase]))
    require_examples(context.config, examples)
    if Phase.reward in examples:
        read_pair_groups(context.config.reward.groups_path)
        if context.config.reward.reads_numeric_columns:
            reward_pairs(context)
    if context.config.data.ptx_path is not None:
        from rlhf.options.ptx.corpus import check_corpus

        check_corpus(context.config, examples, lambda _key, _path: True)
