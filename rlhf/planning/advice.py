"""What would make a run fit that does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from rlhf.config.choices import Device, LoraRole, Phase
from rlhf.config.feature_checks import check_lora
from rlhf.config.roles import Role
from rlhf.config.schema import RunConfig
from rlhf.errors import ConfigError
from rlhf.planning.machine import GIB
from rlhf.planning.plan import Plan, plan_run
from rlhf.planning.workload import Loads

CHECKPOINTING = "model.gradient_checkpointing=true"
ADAPTER_RANK = 16  # of lora=default and lora=all
ROLES = {  # models that learn
    Phase.sft: [LoraRole.sft],
    Phase.reward: [LoraRole.reward],
    Phase.dpo: [LoraRole.actor],
    Phase.ppo: [LoraRole.actor, LoraRole.critic],
}
MOST_NODES = 128  # beyond, more nodes are not proposed

Change = tuple[str, RunConfig]  # overrides, and the configuration with them


def advice(plan: Plan) -> list[str]:
    """Overrides that would make the run fit, with what it then takes; the smallest change first."""
    found = _fitting(_changes(plan.asked, plan.loads), plan.loads)
    return found or _fitting(_together(plan.asked), plan.loads)


def _fitting(changes: Iterable[Change], loads: Loads | None) -> list[str]:
    """Those of ``changes`` that fit, in words."""
    return [text for words, config in changes if (text := _fits(words, config, loads))]


def _changes(config: RunConfig, loads: Loads | None) -> Iterator[Change]:
    """One change after another."""
    auto = _auto(config)
    prefix = "" if config.zero.auto else "zero=auto "
    if prefix:
        yield prefix.strip(), auto
    for phase in config.phase.order:
        settings = getattr(config, phase.value)
        if (settings.micro_batch_size or 1) > 1:
            smaller = replace(settings, micro_batch_size=1)
            yield f"{phase}.micro_batch_size=1", replace(config, **{phase.value: smaller})
    if config.model.gradient_checkpointing is not True:
        yield f"{prefix}{CHECKPOINTING}", _checkpointing(auto)
    if _may_take_adapters(config):
        yield f"{prefix}{_lora(config)}", _adapters(auto)
    if config.hardware.device is Device.cuda:
        yield from _more_nodes(auto, prefix, loads)


def _together(config: RunConfig) -> Iterator[Change]:
    """All that one machine can do."""
    if _may_take_adapters(config):
        words = f"zero=auto {CHECKPOINTING} {_lora(config)}"
        yield words, _adapters(_checkpointing(_auto(config)))


def _auto(config: RunConfig) -> RunConfig:
    return replace(config, zero=replace(config.zero, auto=True))


def _checkpointing(config: RunConfig) -> RunConfig:
    return replace(config, model=replace(config.model, gradient_checkpointing=True))


def _may_take_adapters(config: RunConfig) -> bool:
    """Return whether a model that learns has no adapters yet."""
    wanted = {role for phase in config.phase.order for role in ROLES[phase]}
    there = set(config.lora.roles) if config.lora.rank else set()
    return not wanted <= there and not config.ppo.shared_trunk


def _lora(config: RunConfig) -> str:
    """Return the override that puts adapters into every phase that runs."""
    lora = config.lora
    is_default = lora.rank == ADAPTER_RANK and lora.roles == ROLES[Phase.ppo]
    if lora.rank and not is_default:
        return f"lora.roles=[{','.join(LoraRole)}]"
    return "lora=all" if {Phase.sft, Phase.reward} & set(config.phase.order) else "lora=default"


def _adapters(config: RunConfig) -> RunConfig:
    roles = ROLES[Phase.ppo] if _lora(config) == "lora=default" else list(LoraRole)
    rank = config.lora.rank or ADAPTER_RANK
    return replace(config, lora=replace(config.lora, rank=rank, roles=roles))


def _more_nodes(config: RunConfig, prefix: str, loads: Loads | None) -> Iterator[Change]:
    """Twice as many nodes, and again, up to the first that fits."""
    nodes = 2 * config.hardware.nodes
    while nodes <= MOST_NODES:
        larger = replace(config, hardware=replace(config.hardware, nodes=nodes))
        words = f"{prefix}hardware.nodes={nodes}"
        if _fits(words, larger, loads):
            yield words, larger
            return
        nodes *= 2


def _fits(words: str, config: RunConfig, loads: Loads | None) -> str | None:
    """``words`` with what it takes; None where it does not fit or is not admitted."""
    try:
        check_lora(config)
        plan = plan_run(config, loads)
    except ConfigError:
        return None
    if not plan.fits:
        return None
    most = max(phase.bytes for phase in plan.phases)
    return f"{words} ({describe(plan)}, {most / GIB:.1f} GiB)"


def describe(plan: Plan) -> str:
    """The ZeRO setting of a plan in words."""
    zero = plan.zero
    own = plan.stages.get(Role.critic, zero.stage) != zero.stage
    critic = f" (critic: stage {zero.critic_stage})" if own else ""
    offloaded = {
        "optimiser": zero.offload_optimizer,
        "weights": zero.offload_parameters,
        "reference": zero.offload_reference and Role.reference in plan.roles,
        "reward model": zero.offload_reward and Role.reward in plan.roles,
        "moving average": zero.offload_ema,
    }
    names = [name for name, is_offloaded in offloaded.items() if is_offloaded]
    offloads = f", {' and '.join(names)} offloaded" if names else ""
    return f"ZeRO stage {zero.stage}{critic}{offloads}"
