"""Vary a run's configuration: ZeRO settings for zero=auto, and overrides that make the run fit.

``describe_idle_options`` names options that have no effect, or only cost memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rlhf.base.errors import ConfigError
from rlhf.config.batches import num_ranks
from rlhf.config.choices import Device, Dtype, Phase
from rlhf.config.effects import source_run_determines
from rlhf.config.machine_rates import GIB, Machine
from rlhf.config.roles import SHARDED_WEIGHTS
from rlhf.config.schema.keys import ANSWERING_PHASES
from rlhf.config.schema.rollout import check_rollout
from rlhf.config.schema.run import RunConfig
from rlhf.config.schema.zero import check_training_engine, check_zero
from rlhf.config.validation import check_options, validate

if TYPE_CHECKING:
    from rlhf.plan.plan import Plan
    from rlhf.plan.savings import Saving

MOST_NODES = 128  # largest hardware.nodes that is proposed

Change = tuple[str, RunConfig]  # overrides as text, and the resulting configuration
Planner = Callable[[RunConfig], "Plan"]


def find_fitting_overrides(
    config: RunConfig, planner: Planner, fits: Callable[[Plan], bool] = attrgetter("fits")
) -> list[str]:
    """Return overrides that make the run fit, each with its ZeRO setting and GiB per rank.

    ``planner`` returns the plan of a configuration; ``fits`` decides if a plan fits. The list has
    single changes, the smallest first. Only if none of them fits are changes combined.
    """
    single = _describe_fitting_changes(_single_changes(config), planner, fits)
    nodes = _describe_fitting_changes(_doubled_nodes(config), planner, fits)
    fitting = [*single, *islice(nodes, 1)]
    return fitting or [*_describe_fitting_changes(_combined_changes(config), planner, fits)]


def _single_changes(config: RunConfig) -> Iterator[Change]:
    """Yield changes that may make the run fit, each by itself, the smallest change first."""
    auto, prefix = _set_zero_auto(config)
    if prefix:
        yield prefix.strip(), auto
    for phase in config.phase.order:
        settings = getattr(config, phase.value)
        if (settings.micro_batch_size or 1) > 1:
            smaller = replace(settings, micro_batch_size=1)
            yield f"{phase}.micro_batch_size=1", replace(config, **{phase.value: smaller})
    savings = list(_options_savings(auto))
    for saving in savings:
        if saving.is_exact:
            yield f"{prefix}{saving.words}", saving.config
    for group in _groups_without_checkpointing(config):
        words, changed = _enable_checkpointing(auto, [group])
        yield f"{prefix}{words}", changed
    for saving in savings:
        if not saving.is_exact:
            yield f"{prefix}{saving.words}", saving.config


def _doubled_nodes(config: RunConfig) -> Iterator[Change]:
    """Yield a run on GPUs with 2, 4, 8, ... times its nodes, up to ``MOST_NODES`` nodes."""
    auto, prefix = _set_zero_auto(config)
    nodes = 2 * config.hardware.nodes
    while nodes <= MOST_NODES and config.hardware.device is Device.cuda:
        larger = replace(config.hardware, nodes=nodes)
        yield f"{prefix}hardware.nodes={nodes}", replace(auto, hardware=larger)
        nodes *= 2


def _combined_changes(config: RunConfig) -> Iterator[Change]:
    """Yield zero=auto with gradient checkpointing, then also with an option, or more nodes."""
    groups = _groups_without_checkpointing(config)
    words, changed = _enable_checkpointing(_set_zero_auto(config)[0], groups)
    words = " ".join(filter(None, ["zero=auto", words]))
    yield words, changed
    for saving in _options_savings(changed):
        if not saving.is_exact:
            yield f"{words} {saving.words}", saving.config
    for nodes, larger in _doubled_nodes(changed):
        yield f"{words} {nodes}", larger


def _options_savings(config: RunConfig) -> Iterator[Saving]:
    """Yield the savings of memory that options propose, including options that are off."""
    from rlhf.options.ahead.overlap_plan import propose_smaller_sampling
    from rlhf.options.lora.costs import propose_adapters

    yield from propose_smaller_sampling(config)
    yield from propose_adapters(config)


def _set_zero_auto(config: RunConfig) -> tuple[RunConfig, str]:
    """Return ``config`` with zero=auto, and the word for it if it is a change."""
    auto = replace(config, zero=replace(config.zero, auto=True))
    return auto, "" if config.zero.auto else "zero=auto "


def _groups_without_checkpointing(config: RunConfig) -> list[str]:
    """Return the groups whose trained models keep activations that could be recomputed."""
    order = config.phase.order
    has_critic = Phase.ppo in order and config.ppo.has_separate_critic
    trains = {"model": order != [Phase.reward], "reward_model": Phase.reward in order or has_critic}
    groups = [group for group, is_trained in trains.items() if is_trained]
    return [group for group in groups if getattr(config, group).gradient_checkpointing is not True]


def _enable_checkpointing(config: RunConfig, groups: Sequence[str]) -> Change:
    changed = {
        group: replace(getattr(config, group), gradient_checkpointing=True) for group in groups
    }
    words = " ".join(f"{group}.gradient_checkpointing=true" for group in groups)
    return words, replace(config, **changed)


def _describe_fitting_changes(
    changes: Iterable[Change], planner: Planner, fits: Callable[[Plan], bool]
) -> Iterator[str]:
    """Yield the words, ZeRO setting and GiB per rank of the changes whose plan ``fits``.

    Of several values of the same keys, the first that fits is described.
    """
    described: list[list[str]] = []
    for words, config in changes:
        keys = [word.partition("=")[0] for word in words.split()]
        if keys in described:
            continue
        if config.from_run is not None and any(map(source_run_determines, keys)):
            continue  # the run would refuse these words
        try:
            plan = planner(config)
            if not fits(plan):
                continue
            validate(plan.config)
        except ConfigError:
            continue
        described.append(keys)
        yield f"{words} ({plan.zero_text}, {plan.peak_bytes / GIB:.1f} GiB)"


def describe_idle_options(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for every ZeRO++ or MixZ++ option that saves nothing here, with the reason.

    ``zero.quantize_weights`` is never included, because it halves the traffic within a node too.
    """
    zero, ranks = config.zero, num_ranks(config)
    if config.hardware.nodes == 1:
        parts = zero.hpz_partition_size
        key = f"zero.hpz_partition_size={parts} on one node"
        if parts == ranks > 1:
            yield f"{key} has no effect: the {ranks} ranks already hold all weights between them"
        elif parts > 1:
            yield (
                f"{key} only costs memory, 1/{parts} of the weights on every rank: there is no "
                "traffic between nodes to save"
            )
        # Stage 3 of DeepSpeed 0.19.8 (__avg_scatter_grads) quantizes only for two or more nodes.
        if zero.quantize_gradients:
            yield (
                "zero.quantize_gradients=true has no effect on one node: DeepSpeed 0.19.8 "
                "quantizes gradients only if there are several nodes"
            )
    if config.lora.rank > 0:
        from rlhf.options.lora.costs import idle_key_notes

        yield from idle_key_notes(config)


def zero_candidates(config: RunConfig, machine: Machine) -> list[RunConfig]:
    """Return ``config`` under every valid ZeRO setting, or unchanged without zero.auto.

    Raises:
        ConfigError: if no setting is valid; the error says why the simplest setting is refused.
    """
    if not config.zero.auto:
        return [config]
    candidates: list[RunConfig] = []
    refusals: list[ConfigError] = []
    for changes in _zero_settings(config):
        candidate = replace(config, zero=replace(config.zero, auto=False, **changes))
        if machine.dtype is Dtype.fp16 and 0 in (changes["stage"], changes["critic_stage"]):
            continue
        try:
            check_zero(candidate)
            check_training_engine(candidate)
            if ANSWERING_PHASES(candidate) & set(candidate.phase.order):
                check_rollout(candidate.rollout)
            check_options(candidate)
        except ConfigError as error:
            refusals.append(error)
        else:
            candidates.append(candidate)
    if not candidates:
        raise refusals[0]
    return candidates


def _zero_settings(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield combinations of ZeRO stages and offloading options, the simplest first."""
    has_ppo, no = Phase.ppo in config.phase.order, (False,)
    # On a CPU nothing can be offloaded, because the ranks' memory is the host's memory.
    either = (False, True) if config.hardware.device is Device.cuda else no
    for stage, critic_stage in product((1, 2, 3, 0), (None, 1, 2, 3, 0) if has_ppo else (None,)):
        if stage == critic_stage:
            continue
        stage_of_critic = stage if critic_stage is None else critic_stage
        shards = stage == SHARDED_WEIGHTS
        yield from (
            {
                "stage": stage,
                "critic_stage": critic_stage,
                "offload_optimizer": optimizer,
                "offload_parameters": parameters,
                "offload_reference": reference,
                "offload_reward": reward,
                "offload_ema": average,
            }
            for optimizer, parameters, reference, reward, average in product(
                either if stage else no,
                either if shards else no,
                either if shards else no,
                either if has_ppo and stage_of_critic == SHARDED_WEIGHTS else no,
                either if has_ppo and config.ppo.ema_beta > 0 else no,
            )
        )
