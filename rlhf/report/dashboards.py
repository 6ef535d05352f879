"""Save dashboards to Weights & Biases.

    python -m rlhf.report.dashboards ENTITY/PROJECT

Each dashboard is a saved view of the project. The views have fixed names, so the same command
again replaces them. Building a dashboard needs neither a network nor an account; saving needs both.
A run with tracking=wandb gives this command itself, with --once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.base.command import build_command_parser, run_to_exit_code
from rlhf.base.errors import CapabilityError, ConfigError
from rlhf.base.hashing import sha256_of
from rlhf.base.stored_files import read_stored_text
from rlhf.run.metric_table import METRICS, OTHER_NAMES, PANELS
from rlhf.run.wandb_run import phase_of_metric

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

SWEPT_KEYS = ("ppo.kl_ctl", "ppo.cliprange", "ppo.actor_lr", "ppo.lam", "ppo.ppo_epochs")
RESULTS = ("objective", "result/ppo/gold_after", "result/ppo/score_after", "result/ppo/kl_after")
COSTS = ("hours", "memory_gib")  # both planned and measured


def build_dashboards(entity: str, project: str) -> list[Workspace]:
    """Build three views of a W&B project (PPO, other phases, sweeps) without saving them."""
    try:
        from wandb_workspaces import workspaces
    except ImportError as error:
        raise CapabilityError(
            "dashboards need the package wandb-workspaces: pip install 'rlhf[dashboards]'"
        ) from error
    ppo_sections = [_panel_section(title) for title in PANELS if title.startswith("PPO")]
    # Internal name of each view in W&B -> the title that users see, and the sections.
    views = {
        "rlhfppo": ("PPO health", [*ppo_sections, _cost_section()]),
        "rlhfphases": (
            "SFT, reward model and DPO",
            [_panel_section(phase) for phase in ("SFT", "Reward model", "DPO")],
        ),
        "rlhfsweep": ("Sweeps", [_sweep_section()]),
    }
    built = []
    for name, (title, sections) in views.items():
        view = workspaces.Workspace(
            entity=entity, project=project, name=f"RLHF: {title}", sections=sections
        )
        view._internal_name = f"nw-{name}-v"  # the form that W&B requires for internal names
        built.append(view)
    return built


def save_dashboards(entity: str, project: str) -> list[str]:
    """Save the views, replacing views of the same name; return their addresses.

    Raises:
        CapabilityError: if wandb-workspaces is not installed, W&B refuses or cannot be reached.
    """
    views = build_dashboards(entity, project)
    from wandb_workspaces.workspaces import internal

    addresses = []
    try:
        for view in views:
            name = view._internal_name.removeprefix("nw-").removesuffix("-v")
            try:
                view._internal_id = internal.get_view_dict(entity, project, name)["id"]
            except ValueError as error:
                if "Workspace" not in str(error):
                    raise  # the project does not exist
            addresses.append(view.save().url)
    except Exception as error:
        raise CapabilityError(
            f"{entity}/{project}: Weights & Biases refused ({error}). Type `wandb login`, and log "
            "a run to the project first"
        ) from error
    return addresses


def save_dashboards_once(entity: str, project: str) -> list[str]:
    """Return the views' addresses; save the views only if this machine has not saved these yet.

    A run thus keeps what its user has changed in a view, until a version has other panels.
    """
    from wandb.env import get_cache_dir

    version = sha256_of(repr(PANELS).encode())[:12]
    saved = Path(get_cache_dir()) / "rlhf-views" / f"{entity}+{project}+{version}"
    if (lines := read_stored_text(saved)) is None:
        lines = "\n".join(save_dashboards(entity, project))
        saved.parent.mkdir(parents=True, exist_ok=True)
        saved.write_text(lines)
    return lines.splitlines()


def _panel_section(title: str) -> Section:
    from wandb_workspaces.reports import v2 as wr

    # Users of TRL look for the name that TRL gives to a metric, the first of each list.
    names = {ours: f" ({name})" for name, ours in reversed([*OTHER_NAMES.items()])}
    plots = [
        wr.LinePlot(
            title=panel.title + names.get(panel.metrics[0], ""),
            x=f"{phase_of_metric(panel.metrics[0])}/step",
            y=list(panel.metrics),
            title_y=METRICS[panel.metrics[0]].unit,
        )
        for panel in PANELS[title]
    ]
    return _build_section(title, plots)


def _cost_section() -> Section:
    from wandb_workspaces.reports import v2 as wr

    plots = [
        wr.BarPlot(
            title=f"Planned and measured {cost.replace('_', ' ')}",
            metrics=[wr.SummaryMetric(f"{when}/{cost}") for when in ("planned", "measured")],
        )
        for cost in COSTS
    ]
    return _build_section("Planned and measured", plots)


def _sweep_section() -> Section:
    from wandb_workspaces.reports import v2 as wr

    columns = [wr.ParallelCoordinatesPlotColumn(metric=wr.Config(key)) for key in SWEPT_KEYS]
    columns += [wr.ParallelCoordinatesPlotColumn(metric=wr.SummaryMetric(r)) for r in RESULTS]
    gold, score, kl = (wr.SummaryMetric(name) for name in RESULTS[1:])
    plots = [
        wr.ParallelCoordinatesPlot(title="All runs", columns=columns),
        wr.ParameterImportancePlot(with_respect_to="objective"),
        wr.ScatterPlot(title="Gold over KL", x=kl, y=gold),
        wr.ScatterPlot(title="Score over KL", x=kl, y=score),
    ]
    return _build_section("What each key did", plots)


def _build_section(title: str, panels: Sequence[Any]) -> Section:
    from wandb_workspaces import workspaces

    layout = workspaces.SectionLayoutSettings(columns=3, rows=-(-len(panels) // 3))
    section: Section = workspaces.Section(
        name=title, panels=list(panels), is_open=True, layout_settings=layout
    )
    return section


def main(arguments: Sequence[str]) -> int:
    """Save the dashboards of the project that the command names; return the exit code."""
    parser = build_command_parser("rlhf.report.dashboards", __doc__)
    parser.add_argument("project", metavar="ENTITY/PROJECT")
    parser.add_argument("--once", action="store_true", help="keep views that were saved before")
    options = parser.parse_args(arguments)
    save = save_dashboards_once if options.once else save_dashboards
    return run_to_exit_code(lambda: _save_project_dashboards(options.project, save))


def _save_project_dashboards(project_path: str, save: Callable[[str, str], list[str]]) -> None:
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", project_path):
        raise ConfigError(f"{project_path}: must be ENTITY/PROJECT, as in the project's address")
    entity, project = project_path.split("/")
    for address in save(entity, project):
        sys.stdout.write(f"{address}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
