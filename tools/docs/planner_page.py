"""Compare the planner with the tables of DeepSpeed-Chat's announcement.

``python -m tools.docs.planner_page`` generates the tables of ``benchmarks/planner.md``.
https://github.com/deepspeedai/DeepSpeed/tree/master/blogs/deepspeed-chat
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

from rlhf.config.choices import Device, Phase
from rlhf.config.machine_rates import GIB
from rlhf.config.schema.run import RunConfig
from rlhf.options.hybrid_engine.costs import DEEPSPEED_CHAT
from rlhf.plan.phase_plan import PhasePlan
from rlhf.plan.plan import EFFICIENCY, Plan, plan_run
from tools.docs.memory_table import memory_rows
from tools.docs.pages import composed, write_below

TABLE_MARK = "<!-- Made by `python -m tools.docs.planner_page` from here to the end. -->\n"
DAY, MINUTE, SECOND = 24.0, 1 / 60, 1 / 3600  # hours


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Published results of one run: hours per phase (None: does not fit), and price in dollars."""

    table: int
    experiment: str
    hours: dict[Phase, float] | None
    dollars: float | None = None


def _ppo(table: int, experiment: str, hours: float, dollars: float | None = None) -> Cell:
    name = f"table{table}_{experiment}"
    return Cell(table=table, experiment=name, hours={Phase.ppo: hours}, dollars=dollars)


CELLS = (
    _ppo(1, "opt_6.7b_8xa100_40g", 5.7),
    _ppo(1, "opt_13b_8xa100_40g", 10.8),
    _ppo(1, "opt_30b_8xa100_40g", 1.85 * DAY),
    Cell(table=1, experiment="table1_opt_66b_8xa100_40g", hours=None),
    _ppo(1, "opt_6.7b_8xa100_80g", 4.1, 132),
    _ppo(1, "opt_13b_8xa100_80g", 9, 290),
    _ppo(1, "opt_30b_8xa100_80g", 18, 580),
    _ppo(1, "opt_66b_8xa100_80g", 2.1 * DAY, 1620),
    _ppo(2, "opt_13b", 1.25, 320),
    _ppo(2, "opt_30b", 4, 1024),
    _ppo(2, "opt_66b", 7.5, 1920),
    _ppo(2, "opt_175b", 20, 5120),
    Cell(
        table=4,
        experiment="table4",
        hours={Phase.sft: 2.5, Phase.reward: 0.25, Phase.ppo: 10.8},
    ),
    Cell(
        table=5,
        experiment="table5",
        hours={Phase.sft: 82 * MINUTE, Phase.reward: 5 * MINUTE, Phase.ppo: 7.5},
    ),
    Cell(
        table=6,
        experiment="table6",
        hours={Phase.sft: 2900 * SECOND, Phase.reward: 670 * SECOND, Phase.ppo: 1.2},
    ),
)
FITTED = 1  # the efficiencies are fitted to this table
DOLLARS = 32.0  # per hour of a node of eight A100-80G in 2023: 1.25 hours of eight nodes cost 320

# Table 3: the largest model on one GPU.
LARGEST = {
    "v100_32g": "opt_2.7b",
    "a6000_48g": "opt_6.7b",
    "a100_40g": "opt_6.7b",
    "a100_80g": "opt_13b",
}
SIZES = ("opt_1.3b", "opt_2.7b", "opt_6.7b", "opt_13b", "opt_30b", "opt_66b")
OPTIONS = {
    "all weights": ("lora=none", "model.gradient_checkpointing=false"),
    "all weights, recomputed activations": ("lora=none",),
    "adapters, recomputed activations": (),
}

# Figure 7: the run to scale over nodes. For 13B, each GPU holds all weights during generation.
SCALED = {
    "OPT-13B": ("table1_opt_13b_8xa100_40g", "rollout.hybrid_engine.inference_tp_size=1"),
    "OPT-66B": ("table1_opt_66b_8xa100_80g",),
}
NODES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A published time and the planner's prediction, both in hours."""

    cell: Cell
    phase: Phase
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Return predicted over published time."""
        return self.predicted / self.published


@cache
def plan_of_cell(conf: Path, experiment: str) -> Plan:
    """Return the plan of one of the tables' runs."""
    return plan_run(composed(conf, f"experiment=tables/{experiment}"))


def hours_of_steps(*phases: PhasePlan) -> float:
    """Return the hours of all steps: the announcement has no times of evaluations and saving."""
    return sum(sum(each.step_seconds.values()) * (each.steps or 0) for each in phases) / 3600


def predictions(conf: Path) -> list[Prediction]:
    """Return predictions for every phase with a published time."""
    found = []
    for cell in CELLS:
        if cell.hours is None:
            continue
        found += [
            Prediction(
                cell=cell,
                phase=phase.phase,
                published=cell.hours[phase.phase],
                predicted=hours_of_steps(phase),
            )
            for phase in plan_of_cell(conf, cell.experiment).phases
        ]
    return found


def dollars(plan: Plan) -> float:
    """Return what the planned hours cost at the announcement's price."""
    return hours_of_steps(*plan.phases) * plan.machine.nodes * DOLLARS


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest model that fits a GPU, the first option with which it fits, and its plan."""

    hardware: str
    size: str
    option: str
    plan: Plan


@cache
def largest(conf: Path, hardware: str, *more: str) -> Largest:
    """Return the largest OPT that fits with ``experiment=tables/table3`` and ``more`` overrides."""
    profile = composed(conf, "experiment=tables/table3", f"hardware={hardware}").hardware
    for size, (option, overrides) in product(reversed(SIZES), OPTIONS.items()):
        config = _of_table_3(conf, f"model={size}", *overrides, *more)
        plan = plan_run(replace(config, hardware=profile))
        if plan.fits:
            return Largest(hardware=hardware, size=size, option=option, plan=plan)
    raise AssertionError("OPT-1.3B fits the smallest of them")


@cache  # all GPUs of the table use the same models
def _of_table_3(conf: Path, *overrides: str) -> RunConfig:
    return composed(conf, "experiment=tables/table3", *overrides)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A run on ``gpus`` GPUs; ``speedup`` is relative to its smallest number of GPUs."""

    model: str
    gpus: int
    plan: Plan
    speedup: float

    @property
    def per_gpu(self) -> float:
        """Return the speedup over the proportional speedup; above 1 is superlinear."""
        return self.speedup / (self.gpus / 8)


@cache
def scaling(conf: Path) -> list[Scale]:
    """Return the runs of figure 7, with at most 1,024 sequences per step."""
    found = []
    for model, (experiment, *overrides) in SCALED.items():
        config = composed(conf, f"experiment=tables/{experiment}", *overrides)
        plans = [plan_run(_on(config, nodes)) for nodes in NODES]
        for plan in plans:
            speedup = hours_of_steps(*plans[0].phases) / hours_of_steps(*plan.phases)
            gpus = plan.machine.ranks
            found.append(Scale(model=model, gpus=gpus, plan=plan, speedup=speedup))
    return found


def _on(config: RunConfig, nodes: int) -> RunConfig:
    return replace(config, hardware=replace(config.hardware, nodes=nodes))


def page(conf: Path) -> str:
    """Return all tables as Markdown."""
    return "\n".join(
        (
            "## What the machines reach\n",
            *_efficiencies(),
            "\n## Planned and traced memory\n",
            *_table(*memory_rows(conf)),
            "\n## Tables 1 and 2: step 3, and its price\n",
            *_runs(conf, tables=(1, 2)),
            "\n## Tables 4 to 6: all three steps\n",
            *_steps(predictions(conf)),
            "\n## Table 3: the largest model on one GPU\n",
            *_largest(conf),
            "\n## Figure 7: more GPUs\n",
            *_scaling(conf),
            "",
        )
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _efficiencies() -> list[str]:
    theirs = replace(EFFICIENCY[Device.cuda], **DEEPSPEED_CHAT)
    found = {device.value: shares for device, shares in EFFICIENCY.items()}
    found["DeepSpeed-Chat"] = theirs
    rows = [
        [name.replace("_", " "), *(f"{vars(shares)[name]:g}" for shares in found.values())]
        for name in vars(theirs)
    ]
    return _table(["of the peak, or seconds", *found], rows)


def _runs(conf: Path, *, tables: tuple[int, ...]) -> list[str]:
    rows = []
    for cell in CELLS:
        if cell.table not in tables:
            continue
        plan = plan_of_cell(conf, cell.experiment)
        name = f"`experiment=tables/{cell.experiment}`"
        if cell.hours is None:
            told = "refused" if not plan.fits else "fits"
            rows.append([name, "does not fit", told, "", "", "", "", ""])
            continue
        hours, predicted = cell.hours[Phase.ppo], hours_of_steps(*plan.phases)
        phase = plan.phases[0]
        price = ["", "", ""]
        if cell.dollars is not None:
            found = dollars(plan)
            price = [f"{cell.dollars:,.0f}", f"{found:,.0f}", f"{found / cell.dollars:.2f}"]
        ratio = predicted / hours
        batch = f"{phase.micro_batch}, {phase.rows}"
        rows.append([name, f"{hours:.2f}", f"{predicted:.2f}", f"{ratio:.2f}", *price, batch])
    header = ["run", "hours, published", "predicted", "ratio", "$, published", "predicted", "ratio"]
    return _table([*header, "micro-batch, rows"], rows)


def _steps(found: Sequence[Prediction]) -> list[str]:
    rows = [
        [
            f"`experiment=tables/{each.cell.experiment}`",
            each.phase.value,
            f"{each.published:.2f}",
            f"{each.predicted:.2f}",
            f"{each.ratio:.2f}",
        ]
        for each in found
        if each.cell.table > 2  # noqa: PLR2004
    ]
    return _table(["run", "phase", "hours, published", "predicted", "ratio"], rows)


def _largest(conf: Path) -> list[str]:
    rows = []
    for hardware, size in LARGEST.items():
        found = largest(conf, hardware)
        free = largest(conf, hardware, "zero=auto", "zero.auto=true")
        limit, most = found.plan.limit / GIB, found.plan.phases[0].peak_bytes / GIB
        told = f"{most:.1f} of {limit:.1f}"
        rows.append([hardware, size, found.size, found.option, told, free.size])
    header = ["GPU", "published", "predicted", "what made it fit", "GiB", "with offloading"]
    return _table(header, rows)


def _scaling(conf: Path) -> list[str]:
    rows = [
        [
            scale.model,
            f"{scale.gpus:,}",
            f"{hours_of_steps(*scale.plan.phases):.2f}",
            f"{scale.speedup:.2f}",
            f"{scale.per_gpu:.2f}",
            f"{scale.plan.phases[0].rows}, {1024 // scale.gpus}",
        ]
        for scale in scaling(conf)
    ]
    header = ["model", "GPUs", "hours", "speedup over 8", "over proportion", "rows, share of a GPU"]
    return _table(header, rows)


def renew_page(path: Path, conf: Path) -> None:
    """Replace the tables below the mark in ``path``; keep the text above it."""
    write_below(path, TABLE_MARK, page(conf))


if __name__ == "__main__":
    renew_page(Path("benchmarks/planner.md"), Path("conf"))
