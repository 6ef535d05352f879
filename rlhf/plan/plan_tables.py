"""Format a plan as a table for people and as plan.json for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf.config.choices import Phase, Source
from rlhf.config.machine_rates import GB, GIB
from rlhf.config.schema.keys import ANSWERING_PHASES
from rlhf.options import Backend
from rlhf.plan.advice import describe_idle_options
from rlhf.plan.phase_plan import PhasePlan
from rlhf.plan.plan import Plan
from rlhf.plan.steps import describe_examples

if TYPE_CHECKING:
    from rich.console import RenderableType

STATES = ("weights", "gradients", "optimizer")  # purposes of memory: the first rows of the table
WORK = ("activations", "logits", "kv_cache", "gathered_weights", "buffers", "process")
SMALL = 4 * GIB  # bytes per rank; the table of a smaller plan is in MiB
MIB = 2**20


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return the content of plan.json: memory in GiB (2^30 bytes) per rank, time in hours."""
    zero, machine = plan.config.zero, plan.machine
    content: dict[str, Any] = {"fits": plan.fits}
    if plan.misfit_reason is not None:
        content |= {"reason": plan.misfit_reason, "what_fits": plan.fitting_overrides}
    offloaded = [
        name.removeprefix("offload_")
        for name in vars(zero)
        if name.startswith("offload_") and getattr(zero, name)
    ]
    return content | {
        "zero": plan.zero_stages,
        "offloaded": offloaded,
        "micro_batch": {phase.phase.value: phase.micro_batch for phase in plan.phases},
        "rows": next((phase.rows for phase in plan.phases if phase.rows), None),
        "hours": plan.hours,
        "price_usd": plan.price,
        "ranks": machine.ranks,
        "memory_gib_limit": plan.limit / GIB,
        "host_memory_gib_per_node": plan.offloaded_bytes / GIB,
        "disk_gb": plan.saved_model_bytes / GB,
        "checkpoints_gb": plan.checkpoint_bytes / GB,
        "data": {
            "examples": plan.records or None,
            "is_toy": plan.config.data.source is Source.synthetic,
            "lengths_are_read": plan.loads is not None,
        },
        "phases": {phase.phase.value: _phase_json(plan, phase) for phase in plan.phases},
    }


def _phase_json(plan: Plan, phase: PhasePlan) -> dict[str, Any]:
    lengths, parts = _token_lengths(plan, phase.phase), phase.peak_parts
    return {
        "tokens": {name: {"mean": mean, "limit": most} for name, (mean, most) in lengths.items()},
        "hours": None if phase.steps is None else phase.seconds / 3600,
        "steps": phase.steps,
        "step_seconds": phase.step_seconds,
        "other_seconds": phase.other_seconds,
        "memory_gib_per_rank": phase.peak_bytes / GIB,
        "moment": phase.peak_moment,
        "memory": {part: parts[part] / GIB for part in _memory_purposes(plan) if parts[part]},
    }


def _memory_purposes(plan: Plan) -> list[str]:
    """Return the purposes of memory in the order of the table; purposes of options come last."""
    models = (model for models in plan.models.values() for model in models)
    copies = (name for model in models for name in model.fp32_copies)
    purposes = (part for phase in plan.phases for part in phase.peak_parts)
    return list(dict.fromkeys((*STATES, *copies, *WORK, *purposes)))


def _token_lengths(plan: Plan, phase: Phase) -> dict[str, tuple[float, int]]:
    """Return the mean and the limit of tokens per sequence, or per prompt and per response.

    If the data was not read, every text is assumed to be as long as its limit.
    """
    config, load = plan.config, None if plan.loads is None else plan.loads[phase]
    if phase is not Phase.ppo:
        most = getattr(config, phase).max_tokens
        return {"sequence": (load.mean_tokens if load else most, most)}
    prompt, most = config.rollout.max_prompt_tokens, config.token_limit_after_prompt[1]
    tokens, answer = (load.mean_tokens, load.answer) if load else (prompt, None)
    return {"prompt": (tokens, prompt), "response": (answer or most, most)}


def plan_summary(plan: Plan) -> str:
    """Return one line: setting, memory, time, price and steps, or why the run does not fit."""
    if not plan.fits:
        return f"does not fit: {plan.misfit_reason}"
    return f"{_cost_text(plan)} for {describe_steps_and_examples(plan)}"


def describe_steps_and_examples(plan: Plan) -> str:
    """Return as text the numbers of steps and examples on which time and price are based."""
    config = plan.config
    unit = "pairs" if config.reward.unpaired is None else "responses"
    batches = {
        Phase.sft: f"{config.sft.batch_size} examples",
        Phase.reward: f"{config.reward.batch_size} {unit}",
        Phase.dpo: f"{config.dpo.batch_size} pairs",
        Phase.ppo: f"{config.ppo.rollout_batch_size} responses "
        f"of up to {config.token_limit_after_prompt[1]} tokens",
    }
    steps = ("?" if phase.steps is None else f"{phase.steps:,}" for phase in plan.phases)
    phases = (
        f"{phase.phase} {number} step{'' if number == '1' else 's'} of {batches[phase.phase]}"
        for phase, number in zip(plan.phases, steps, strict=True)
    )
    return f"{', '.join(phases)}, from {describe_examples(config.data, plan.records)}"


def _cost_text(plan: Plan) -> str:
    number = plan.machine.ranks
    ranks = "one rank" if number == 1 else f"each of {number} ranks"
    words = [
        plan.zero_text,
        f"{plan.peak_bytes / GIB:.1f} of {plan.limit / GIB:.1f} GiB on {ranks}",
        _time_text(plan.hours),
    ]
    if plan.price is not None:
        words.append(f"${plan.price:,.2f}")
    return ", ".join(words)


def render_plan(plan: Plan) -> list[RenderableType]:
    """Return a table of memory and time per phase, then the verdict (fits or not) and notes."""
    from rich.table import Table

    hardware = plan.config.hardware
    nodes = f"{hardware.nodes} x " if hardware.nodes > 1 else ""
    title = f"{nodes}{hardware.name}, {plan.machine.dtype}, {plan.zero_text}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for phase in plan.phases:
        table.add_column(phase.phase.value, justify="right")
    unit, divisor, digits = ("MiB", MIB, 0) if plan.peak_bytes < SMALL else ("GiB", GIB, 2)

    def add_row(name: str, numbers: list[float | None], digits: int = 2) -> None:
        if any(numbers):
            table.add_row(name, *(f"{number:.{digits}f}" if number else "" for number in numbers))

    for part in _memory_purposes(plan):
        add_row(part.replace("_", " "), [p.peak_parts[part] / divisor for p in plan.phases], digits)
    table.add_section()
    add_row(f"{unit} per rank", [phase.peak_bytes / divisor for phase in plan.phases], digits)
    table.add_row("when", *(phase.peak_moment for phase in plan.phases))
    add_row(f"{unit} offloaded", [phase.host / divisor for phase in plan.phases], digits)
    table.add_section()
    table.add_row("micro-batch", *(str(phase.micro_batch) for phase in plan.phases))
    table.add_row("rows", *(str(phase.rows or "") for phase in plan.phases))
    table.add_row("steps", *(str(phase.steps or "?") for phase in plan.phases))
    lengths = [_token_lengths(plan, phase.phase) for phase in plan.phases]
    for name in dict.fromkeys(name for each in lengths for name in each):
        pairs = (each.get(name) for each in lengths)
        cells = ("" if pair is None else "{:.0f} (max {})".format(*pair) for pair in pairs)
        table.add_row(f"{name}, tokens", *cells)
    activities = (part for phase in plan.phases for part in phase.step_seconds if part != "train")
    for part in dict.fromkeys(("generate", "score", *activities, "train")):
        add_row(f"{part}, s per step", [each.step_seconds.get(part) for each in plan.phases])
    for part, name in {"evaluate": "evaluate, s in all", "prepare": "build and save, s"}.items():
        add_row(name, [each.other_seconds.get(part) for each in plan.phases], digits=1)
    hours = (None if phase.steps is None else phase.seconds / 3600 for phase in plan.phases)
    table.add_row("time", *(_time_text(value) for value in hours))
    notes = [f"the time is for {describe_steps_and_examples(plan)}", *_plan_caveats(plan)]
    if plan.machine.is_estimated:
        notes.append("this CPU's rates are estimates: the first run measures them")
    notes += [*plan.warnings, *describe_idle_options(plan.config)]
    if plan.fits:
        models, checkpoints = plan.saved_model_bytes / GB, plan.checkpoint_bytes / GB
        disk = f"models on disk: {models:.1f} GB, checkpoints up to {checkpoints:.1f} GB"
        verdict = f"fits: {_cost_text(plan)}; {disk}"
        return [table, verdict, *notes]
    ways = (f"what fits: {way}" for way in plan.fitting_overrides)
    return [table, f"does not fit: {plan.misfit_reason}", *ways, *notes]


def _plan_caveats(plan: Plan) -> list[str]:
    """Return notes on why the time and price may not apply to the user's own task."""
    notes, phases = [], [phase.phase for phase in plan.phases]
    if plan.config.data.source is Source.synthetic:
        sizes = ["rollout.max_response_tokens"] if ANSWERING_PHASES(plan.config) & {*phases} else []
        sizes += ["ppo.steps" if phase is Phase.ppo else f"{phase}.epochs" for phase in phases]
        notes.append(
            "data=synthetic is a toy task with short texts: set data, data.path, "
            f"{', '.join(sizes)} as in your run before you trust the time and price"
        )
    if plan.config.lora.rank > 0:
        from rlhf.options.lora.costs import cost_warnings

        notes += cost_warnings(plan.config, phases)
    if Phase.ppo in phases and plan.config.rollout.backend is Backend.vllm_server:
        from rlhf.options.vllm.costs import describe_server_costs

        notes.append(describe_server_costs(plan.config))
    if plan.machine.is_gpu and plan.machine.nodes > 1:
        notes.append(
            "before the first run on these nodes, check their links in a minute: torchrun on each "
            "node with -m rlhf.gpu_check.collectives (docs/operations.md, Several nodes)"
        )
    if plan.loads is None:
        notes.append("the data was not read: every text is assumed to be as long as its limit")
    return notes


def _time_text(hours: float | None) -> str:
    if hours is None:
        return "unknown time"
    if hours < 1 / 60:
        return f"{3600 * hours:.1f} s"
    if hours < 1:
        return f"{60 * hours:.1f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"  # noqa: PLR2004
