"""Draw the measurements: parts of an iteration, tokens per second, cost against the work.

    PYTHONPATH=. python benchmarks/plots.py [FIGURES.json ...] [--folder docs/images]

Reads what the other benchmarks wrote (default: all of benchmarks/results) and draws one picture for
each file of ``ppo_step.py``, ``rollout.py`` and ``scaling.py``; without files the planner's figure
of more and more GPUs too (benchmarks/planner.md). Needs the extra ``benchmarks``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import BENCHMARKS, ROOT

from tools.docs.planner_page import scaling as plans_of_more_gpus

# Okabe and Ito's colours, which differ for every kind of colour vision, and in grey.
COLOURS = {"generate": "#0072B2", "score": "#E69F00", "train": "#009E73", "rest": "#CCCCCC"}
OWN, OTHER, LIMIT = "#0072B2", "#999999", "#D55E00"
PARTS = {"generate": "generation", "score": "scoring", "train": "training"}
AXES = {
    "response": "response tokens",
    "batch": "sequences",
    "padding": "share of padding in the prompts",
    "size": "model",
}
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "font.size": 10,
    "legend.frameon": False,
    "svg.hashsalt": "rlhf",  # the same figures make the same file
}


def iteration(found: dict[str, Any], pyplot: Any) -> Any:
    """Stacked bars: the parts of an iteration, ours above the peers'."""
    rows = found["rows"][::-1]
    figure, axis = pyplot.subplots(figsize=(8, 0.42 * len(rows) + 1.3), layout="constrained")
    names = [row["way"] for row in rows]
    left = [0.0] * len(rows)
    rests = [max(0.0, row["iteration"] - sum(row[part] for part in PARTS)) for row in rows]
    for part, title in (PARTS | {"rest": "rest"}).items():
        widths = rests if part == "rest" else [row[part] for row in rows]
        axis.barh(names, widths, left=left, color=COLOURS[part], label=title, height=0.7)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, (end, row) in enumerate(zip(left, rows, strict=True)):
        axis.annotate(
            f"{row['iteration']:.2f}",
            (end, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    axis.set(xlabel="seconds", title=f"One PPO iteration, shape {found['options']['shape']}")
    axis.tick_params(axis="y", length=0)
    axis.margins(x=0.08)
    figure.legend(loc="outside lower center", ncols=len(COLOURS))
    return figure


def generation(found: dict[str, Any], pyplot: Any) -> Any:
    """Tokens per second of every way; a mark where the bandwidth ends it."""
    rows = [row for row in found["rows"] if "error" not in row][::-1]
    figure, axis = pyplot.subplots(figsize=(8, 0.42 * len(rows) + 1.3), layout="constrained")
    several = len({(row["shape"], row["batch"]) for row in rows}) > 1
    names = [
        f"{row['way']} ({row['shape']}, {row['batch']})" if several else row["way"] for row in rows
    ]
    speeds = [row["tokens_per_second"] for row in rows]
    colours = [OWN if row["way"].startswith("rollout=fast") else OTHER for row in rows]
    bars = axis.barh(names, speeds, color=colours, height=0.7)
    axis.bar_label(bars, fmt="{:,.0f}", padding=4)
    floors = [row["floor_tokens_per_second"] for row in rows]
    mark = {"marker": "|", "markersize": 14, "markeredgewidth": 2, "linestyle": "none"}
    axis.plot(floors, names, color=LIMIT, label="limit of the memory bandwidth", **mark)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set(xlabel="tokens per second", title=f"Generation, shape {found['options']['shape']}")
    axis.tick_params(axis="y", length=0)
    axis.margins(x=0.1)
    figure.legend(loc="outside lower center")
    return figure


def scaling(found: dict[str, Any], pyplot: Any) -> Any:
    """Seconds of the parts against each thing that was changed."""
    sweeps = {
        name: [row for row in found["rows"] if row["sweep"] == name]
        for name in AXES
        if any(row["sweep"] == name for row in found["rows"])
    }
    size = (3.2 * len(sweeps), 3.2)
    figure, panels = pyplot.subplots(
        1, len(sweeps), figsize=size, layout="constrained", squeeze=False
    )
    for axis, (name, rows) in zip(panels[0], sweeps.items(), strict=True):
        places = [row["at"] for row in rows]
        for (part, title), marker in zip(PARTS.items(), "os^", strict=True):
            seconds = [row[part] for row in rows]
            axis.plot(
                places, seconds, color=COLOURS[part], marker=marker, markersize=5, label=title
            )
        axis.set(xlabel=AXES[name], ylim=(0, None))
        if name in ("response", "batch"):
            axis.set_xticks(places)
    panels[0][0].set_ylabel("seconds")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PARTS))
    figure.suptitle(
        f"Cost of a PPO iteration, shape {found['options']['shape']}", x=0.01, ha="left"
    )
    return figure


def resident(found: dict[str, Any], pyplot: Any) -> Any:
    """Resident memory over the PPO steps of a long run."""
    figure, axis = pyplot.subplots(figsize=(8, 2.8), layout="constrained")
    memory = found["memory_mib"]
    axis.plot(range(1, len(memory) + 1), memory, color=OWN)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set(xlabel="PPO step", ylabel="MiB", title="Resident memory", ylim=(0, None))
    return figure


def planned(found: dict[str, Any], pyplot: Any) -> Any:
    """Hours on more and more GPUs, and what they would be in proportion."""
    models = list(dict.fromkeys(row["model"] for row in found["rows"]))
    figure, panels = pyplot.subplots(1, len(models), figsize=(8, 3.4), layout="constrained")
    for axis, model in zip(panels, models, strict=True):
        rows = [row for row in found["rows"] if row["model"] == model]
        gpus, hours = [row["gpus"] for row in rows], [row["hours"] for row in rows]
        proportion = [hours[0] * gpus[0] / number for number in gpus]
        axis.plot(gpus, proportion, color=OTHER, linestyle="--", label="in proportion")
        axis.plot(gpus, hours, color=OWN, marker="o", markersize=5, label="planned")
        axis.set(xscale="log", yscale="log", xlabel="GPUs", title=model)
        axis.set_xticks(gpus, [f"{number:,}" for number in gpus])
        axis.minorticks_off()
    panels[0].set_ylabel("hours")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


PICTURES: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "ppo_step": iteration,
    "rollout": generation,
    "scaling": scaling,
    "long_run": resident,
}


def draw(figures: Path, folder: Path) -> Path | None:
    """The picture of one file of figures, as SVG; None where there is none for its benchmark."""
    found = json.loads(figures.read_text())
    picture = PICTURES.get(found["benchmark"])
    if picture is scaling and not any(row["sweep"] in AXES for row in found["rows"]):
        return None
    return None if picture is None else save(picture, found, folder / f"{figures.stem}.svg")


def draw_plan(folder: Path) -> Path:
    """The planner's picture, made from ``conf/``."""
    rows = [
        {"model": scale.model, "gpus": scale.gpus, "hours": scale.plan.seconds / 3600}
        for scale in plans_of_more_gpus(ROOT / "conf")
    ]
    return save(planned, {"rows": rows}, folder / "planner_scaling.svg")


def save(picture: Callable[[dict[str, Any], Any], Any], found: dict[str, Any], place: Path) -> Path:
    """Draw ``found`` and write it as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure = picture(found, pyplot)
        figure.savefig(place, metadata={"Date": None})
        pyplot.close(figure)
    return place


def main(arguments: Sequence[str]) -> None:
    """Draw all files that are named."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("figures", nargs="*", type=Path)
    options.add_argument("--folder", type=Path, default=ROOT / "docs" / "images")
    given = options.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    for figures in given.figures or sorted((BENCHMARKS / "results").glob("*.json")):
        place = draw(figures, given.folder)
        if place is not None:
            sys.stdout.write(f"{place}\n")
    if not given.figures:
        sys.stdout.write(f"{draw_plan(given.folder)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
