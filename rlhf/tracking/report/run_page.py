"""Write ``report.html`` of a run: verdict, curves, alarms, samples, time, memory and settings.

The page is one file that loads nothing, and it is made from the files in the run directory alone,
so that a run that crashed has one too. Text of models and data is escaped.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from rlhf.atomic import replacing
from rlhf.config.freeze import command_words
from rlhf.tracking.alarms import alarms_of
from rlhf.tracking.report.evaluation_section import evaluation_section
from rlhf.tracking.report.markup import Markup, joined, tag
from rlhf.tracking.report.page import document, scrolled, section
from rlhf.tracking.report.run_charts import critic, curves, optimisation, rest, target_of
from rlhf.tracking.report.run_files import RunFiles, read_files
from rlhf.tracking.step_alarms import Alarm
from rlhf.tracking.summary import summary_parts

REPORT = "report.html"
PHASES = ("sft", "reward", "dpo", "ppo")


def write_report(run_dir: Path) -> Path:
    """Write the report of the run in ``run_dir``, finished or not; return its path.

    Raises:
        CheckpointError: if ``run_dir`` is not the directory of a run.
    """
    path = run_dir / REPORT
    page = run_page(read_files(run_dir))
    with replacing(path) as building:
        building.write_text(page, encoding="utf-8")
    return path


def run_page(run: RunFiles) -> str:
    """Return the page of a run."""
    title = f"{run.config['name']}, seed {run.config['seed']}"
    body = joined(
        tag("header", tag("h1", title), _verdict(run), tag("p", str(run.folder), class_="path")),
        tag(
            "main",
            _results(run),
            evaluation_section(run.folder),
            _doubts(run),
            optimisation(run),
            *curves(run),
            critic(run),
            _samples(run),
            rest(run),
            _settings(run),
        ),
    )
    return document(title, body, script="samples.js")


def _verdict(run: RunFiles) -> Markup:
    """Return one line: what the run reached, and how many reasons there are to doubt it."""
    if run.result is None:
        phases = [name for name in PHASES if (run.folder / name / "result.json").exists()]
        done = f"finished phases: {', '.join(phases)}" if phases else "no phase finished"
        return tag("p", f"This run has not finished; {done}.", class_="verdict doubtful")
    doubts = len(run.alarms) + len(alarms_of(run.result["phases"]))
    ppo = run.result["phases"].get("ppo", {})
    reached = f"objective {run.result['objective']:.3f}"
    if "exact_after" in ppo:
        reached = f"exactly right {ppo['exact_before']:.1%} → {ppo['exact_after']:.1%}, {reached}"
    told = f"{doubts} reason{'s' if doubts > 1 else ''} to doubt it" if doubts else "no alarms"
    return tag("p", f"{reached}; {told}", class_="verdict doubtful" if doubts else "verdict")


def _results(run: RunFiles) -> Markup:
    """Return the table of the summary: measures before and after each phase."""
    if run.result is None:
        return Markup()
    titles = ("phase", "measure", "before", "after", "time")
    rows = [
        tag(
            "tr",
            tag("td", "" if number else part.name),
            tag("td", row.measure.strip(), class_="sub" if row.measure[0] == " " else None),
            *(tag("td", cell, class_="number") for cell in (row.before, row.after)),
            tag("td", "" if number else part.duration, class_="number"),
        )
        for part in summary_parts(run.result)
        for number, row in enumerate(part.rows)
    ]
    head = tag("thead", tag("tr", *(tag("th", title, scope="col") for title in titles)))
    return section("Results", scrolled("Results", tag("table", head, tag("tbody", *rows))))


def _doubts(run: RunFiles) -> Markup:
    """Return the alarms, each with a link target for its flag, and the doubts about the result."""
    ends = [] if run.result is None else alarms_of(run.result["phases"])
    items = [
        tag("li", alarm.line, " ", *_link_to_samples(run, alarm), id=target_of(alarm))
        for alarm in run.alarms
    ]
    items += [tag("li", line) for line in ends]
    if not items:
        return Markup()
    return section("Reasons to doubt this run", tag("ul", *items, class_="doubts"))


def _link_to_samples(run: RunFiles, alarm: Alarm) -> Iterator[Markup]:
    """Yield a link to the last samples before an alarm, if there are any."""
    steps = [s["step"] for s in run.samples if s["phase"] == alarm.phase]
    before = [step for step in steps if step <= alarm.step]
    if before:
        step = max(before)
        yield tag("a", f"Samples of step {step}", href="#samples-title", data_step=step)


def _samples(run: RunFiles) -> Markup:
    """Return the browser of samples; the page's script fills it from the data beside it."""
    if not run.samples:
        return Markup()
    # "<" is escaped, so that no text of a model can end the element.
    data = json.dumps(run.samples, ensure_ascii=False).replace("<", "\\u003c")
    controls = tag(
        "div",
        tag("label", "Find ", Markup('<input type="search" id="find">')),
        tag("label", "Sort by ", Markup('<select id="sort"></select>')),
        tag("label", "Step ", Markup('<select id="step"></select>')),
        tag("label", "Shade tokens by ", Markup('<select id="shade"></select>')),
        tag("span", id="count", role="status"),
        class_="controls",
    )
    return tag(
        "section",
        tag("h2", "Samples", id="samples-title"),
        tag("p", "The same held-out prompts at every evaluation.", class_="note"),
        controls,
        tag("div", id="histogram", role="group", aria_label="Scores of the last answers"),
        tag("div", id="browser"),
        tag("script", Markup(data), type="application/json", id="samples"),
        tag("noscript", "The samples need scripts; samples.jsonl holds them too."),
    )


def _settings(run: RunFiles) -> Markup:
    rows = {
        key: tag("tr", tag("th", key, scope="row"), tag("td", json.dumps(value)))
        for key, value in run.config.items()
    }
    versions = (run.result or {}).get("versions", {})
    note = tag("p", ", ".join(f"{name} {version}" for name, version in versions.items()))
    words = command_words(run.folder)
    typed = tag("pre", shlex.join(["python", "launch.py", *words])) if words else Markup()
    keys = {word.partition("=")[0].lstrip("+") for word in words}
    differing = [row for key, row in rows.items() if key in keys]
    parts = {"Set by the command instead of a preset": differing, "All settings": rows.values()}
    tables = [
        scrolled(title, tag("table", tag("caption", title), tag("tbody", *part)))
        for title, part in parts.items()
        if part
    ]
    return tag("details", tag("summary", f"Settings ({len(rows)} keys)"), typed, note, *tables)
