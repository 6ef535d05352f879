"""Write ``report.html`` of a run: verdict, curves, alarms, samples, time, memory and settings.

The page is one file that loads nothing. It is made only from files in the run directory, so a run
that crashed has a report too. Text of models and data is escaped.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from rlhf.base.atomic import replace_atomically
from rlhf.config.choices import Phase
from rlhf.config.freeze import read_command
from rlhf.report.alarms import find_doubts
from rlhf.report.evaluation_section import read_evaluation
from rlhf.report.page import Headline, render_template
from rlhf.report.run_charts import (
    alarm_element_id,
    charts_without_panel,
    critic_section,
    over_optimisation_section,
    panel_sections,
    true_value_section,
)
from rlhf.report.run_files import RunFiles, read_run_files
from rlhf.report.summary import summary_blocks
from rlhf.tracking.step_alarms import Alarm

REPORT = "report.html"


def write_report(run_dir: Path) -> Path:
    """Write the report of the run in ``run_dir``, finished or not; return its path.

    Raises:
        CheckpointError: if ``run_dir`` is not the directory of a run.
    """
    path = run_dir / REPORT
    page = run_page(read_run_files(run_dir))
    with replace_atomically(path) as building:
        building.write_text(page, encoding="utf-8")
    return path


def run_page(run: RunFiles) -> str:
    """Return the HTML of a run's report."""
    result = run.result
    words = read_command(run.folder)
    sections = [over_optimisation_section(run), *panel_sections(run), critic_section(run)]
    sections.append(true_value_section(run))
    return render_template(
        "run.html",
        scripts=["tokens.js", "samples.js"],
        title=f"{run.config['name']}, seed {run.config['seed']}",
        verdict=_headline(run),
        place=run.folder,
        run=run,
        results=[] if result is None else list(summary_blocks(result)),
        evaluation=read_evaluation(run.folder),
        alarms=[(alarm, _step_of_last_samples(run, alarm)) for alarm in run.alarms],
        doubts=[] if result is None else find_doubts(result["phases"], run.series),
        alarm_element_id=alarm_element_id,
        sections=[section for section in sections if any(section.charts)],
        rest=charts_without_panel(run),
        command=shlex.join(["python", "launch.py", *words]) if words else "",
        versions=(result or {}).get("versions", {}),
        settings=_tables_of_settings(run, words),
    )


def _headline(run: RunFiles) -> Headline:
    """Return the headline: the run's objective, and the number of reasons to doubt it."""
    if run.result is None:
        phases = [name for name in Phase if (run.folder / name / "result.json").exists()]
        done = f"finished phases: {', '.join(phases)}" if phases else "no phase finished"
        return Headline(f"This run has not finished; {done}.", is_doubtful=True)
    doubts = len(run.alarms) + len(find_doubts(run.result["phases"], run.series))
    ppo = run.result["phases"].get("ppo", {})
    reached = f"objective {run.result['objective']:.3f}"
    if "exact_after" in ppo:
        reached = f"exactly right {ppo['exact_before']:.1%} → {ppo['exact_after']:.1%}, {reached}"
    told = f"{doubts} reason{'s' if doubts > 1 else ''} to doubt it" if doubts else "no alarms"
    return Headline(f"{reached}; {told}", is_doubtful=bool(doubts))


def _step_of_last_samples(run: RunFiles, alarm: Alarm) -> int | None:
    """Return the step of the last samples up to the step of ``alarm``, or None without samples."""
    steps = [sample["step"] for sample in run.samples if sample["phase"] == alarm.phase]
    return max((step for step in steps if step <= alarm.step), default=None)


def _tables_of_settings(run: RunFiles, words: list[str]) -> dict[str, dict[str, str]]:
    """Return two tables by title: the keys that the command ``words`` set, and all keys."""
    rows = {key: json.dumps(value) for key, value in run.config.items()}
    keys = {word.partition("=")[0].lstrip("+") for word in words}
    differing = {key: value for key, value in rows.items() if key in keys}
    return {"Set by the command instead of a preset": differing, "All settings": rows}
