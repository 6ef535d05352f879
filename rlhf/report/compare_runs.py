"""Print a comparison of runs in 80 columns, and write its page; for a sweep, also its results.

The page, ``sweep.html`` for a sweep, shows the settings and their curves. It is one file that loads
nothing. It is made only from files of the runs, so a sweep that was stopped has a page too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.base.atomic import write_text_atomically
from rlhf.base.errors import ConfigError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.stored_files import RESULT, DamagedFileError, read_stored_text
from rlhf.config.freeze import FROZEN, PARSE_ERRORS, load_plain_mapping
from rlhf.report.alarms import read_doubts
from rlhf.report.charts import number_text
from rlhf.report.comparison import (
    Setting,
    Tried,
    describe_unlikeness,
    estimate_text,
    find_run_folders,
    find_tried,
    group_runs_by_setting,
    read_compared_run,
)
from rlhf.report.differences import (
    NOT_COMPARED,
    UNCLEAR,
    SettingsComparison,
    compare_with_first,
    comparison_json,
)
from rlhf.report.first_screen import MEANINGS, Tile
from rlhf.report.gain import read_gain
from rlhf.report.page import Headline, render_template
from rlhf.report.sweep_charts import KL, frontier_chart, setting_curves
from rlhf.run.console import Console
from rlhf.run.results import read_run_result, write_json

if TYPE_CHECKING:
    from rich.table import Table

STUDY_RESULTS = "optimization_results.yaml"
SWEEP_REPORT = "sweep.html"
GOALS = ("gold", "exactly right", "score")  # measures that are drawn over KL
LONGEST_NAME = 60  # most characters of a setting's name in the headline
TEXTS: Mapping[str, Mapping[str, str]] = read_yaml_beside(__file__, "comparison_texts.yaml")
DOUBTS, NOTES = TEXTS["no_difference"], TEXTS["notes"]
Ranked = tuple[int, Setting]  # the index of a setting among all settings, and the setting


def print_comparison(
    paths: Sequence[Path], html: Path | None = None, registry: Path | None = None
) -> dict[str, Any]:
    """Print and return a comparison of the runs in ``paths``; write its page to the file ``html``.

    If ``paths`` is one sweep, its page and its numbers are also written to the sweep's folder.
    ``find_tried`` counts the settings that were tried, in ``registry`` if it is given.

    Raises:
        CheckpointError: if a path holds no run.
        ConfigError: if the folder of ``html``, or ``registry``, does not exist.
    """
    if html is not None and not html.parent.is_dir():
        raise ConfigError(f"--html={html}: there is no folder {html.parent}; create it first")
    if registry is not None and not registry.is_dir():
        raise ConfigError(f"--registry={registry}: there is no such folder; name one with runs")
    settings = group_runs_by_setting(list(map(read_compared_run, find_run_folders(paths))))
    tried = find_tried(settings, registry=registry, is_whole_folder=len(paths) == 1)
    comparison = compare_with_first(settings, tried)
    content = comparison_json(settings, comparison)
    console = Console()
    for line in legend_lines(settings):
        console.say(line)
    console.show(comparison_table(settings, comparison))
    for line in filter(None, (describe_unlikeness(settings), *note_lines(settings, comparison))):
        console.say(line)
    for run in (run for setting in settings for run in setting.runs if not run.measures):
        console.say(f"no result: {run.folder}")
    if len(paths) == 1 and not (paths[0] / FROZEN).exists():
        write_json(paths[0] / RESULT, content)
        console.say(f"wrote {write_sweep_report(paths[0], settings, tried)}")
    if html is not None:
        count = sum(len(setting.runs) for setting in settings)
        page = sweep_page(f"Comparison of {count} runs", settings, tried=tried)
        write_text_atomically(html, page)
        console.say(f"wrote {html}")
    return content


def legend_lines(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield a title, and for each setting its number in the table, its runs and its values."""
    yield "Settings"
    for number, setting in enumerate(settings, 1):
        counted = f"{len(setting.finished_runs())} of {len(setting.runs)} runs"
        yield f"  {number:>2}  {counted}  {setting.label}"


def comparison_table(settings: Sequence[Setting], comparison: SettingsComparison) -> Table:
    """Return a table of each measure's mean, 95 % interval and difference from the baseline."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    baseline = next((n for n, s in enumerate(settings, 1) if s is comparison.baseline), 1)
    columns = ["measure", "setting", "mean"]
    columns += [f"minus setting {baseline}", ""] if settings[1:] else []
    for title in columns:
        table.add_column(title, justify="left" if title in {"measure", ""} else "right")
    for title in comparison.titles:
        measure_cell = iter((title,))  # only the first row of a measure has it
        for number, setting in enumerate(settings):
            if (mean := setting.estimates().get(title)) is None:
                continue
            difference = comparison.differences.get((number, title))
            minus = estimate_text(difference.estimate, "+") if difference else ""
            cells = (next(measure_cell, ""), str(number + 1), estimate_text(mean), minus)
            table.add_row(*(*cells, comparison.verdict_text(number, title))[: len(columns)])
        table.add_section()
    return table


def note_lines(settings: Sequence[Setting], comparison: SettingsComparison) -> Iterator[str]:
    """Yield sentences on doubtful runs, the settings tried, verdicts, and measures left out."""
    yield from filter(None, (describe_doubts(n, each) for n, each in enumerate(settings, 1)))
    tried, tests = comparison.tried, comparison.num_tests
    if tried.num_settings > 1:
        names = " and ".join(place.name for place in tried.places)
        corrected = NOTES["corrected"].format(tests=tests) if tests else ""
        if tests and tried.is_baseline_chosen:
            corrected += NOTES["chosen_baseline"]
        yield NOTES["tried"].format(
            shown=len(settings),
            tried=tried.num_settings,
            places=f" in {names}" if names else "",
            corrected=corrected,
        )
    if tried.num_settings > len(settings):
        yield NOTES["registry"]
    if tests:
        yield NOTES["tested"].format(unclear=UNCLEAR)
    elif comparison.differences:
        yield NOTES["few_seeds"]
    numbers = [n for n, setting in enumerate(settings, 1) if setting.shared_origins()]
    if numbers:
        runs = sorted({each for s in settings for each in s.shared_origins()})
        listed = ", ".join(map(str, numbers))
        yield NOTES["shared_phases"].format(numbers=listed, runs=", ".join(runs))
    known = (difference.prompt_share for difference in comparison.differences.values())
    if shares := [share for share in known if share is not None]:
        yield NOTES["noise_of_prompts"].format(low=min(shares), high=max(shares))
    for title, reason in comparison.left_out.items():
        yield f"not compared: {title} ({reason})"


class StudyResults(NamedTuple):
    """The objectives of an Optuna study, and its solutions: trials that no other trial beats."""

    maximize: Sequence[str]
    minimize: Sequence[str]
    solutions: Mapping[int, Mapping[str, float]]  # value of each objective, by trial number

    @property
    def headline(self) -> str:
        """Return a sentence that names the solutions: the Pareto front, or the best trials."""
        goals = [f"{name} (higher)" for name in self.maximize]
        goals += [f"{name} (lower)" for name in self.minimize]
        named = " and ".join(goals)
        if not self.solutions:
            return f"No trial has a valid result yet for {named}"
        trials = ", ".join(map(str, self.solutions))
        if len(goals) > 1:
            return f"Pareto front of {named}: trial{'s' * (len(self.solutions) > 1)} {trials}"
        (value,) = next(iter(self.solutions.values())).values()
        tied = " (tied)" if len(self.solutions) > 1 else ""
        return f"Best {named} is {value:.4g}: trial{'s' if tied else ''} {trials}{tied}"

    def has_solution(self, setting: Setting) -> bool:
        """Return True if one of the trials in ``setting`` is a solution."""
        return not self.solutions.keys().isdisjoint(trial_numbers(setting))


def read_study_results(folder: Path) -> StudyResults | None:
    """Read the objectives and solutions of the search in ``folder``; None if it is not a search.

    Raises:
        DamagedFileError: if optimization_results.yaml is not what a search writes.
    """
    path = folder / STUDY_RESULTS
    if (text := read_stored_text(path)) is None:
        return None
    try:
        content = load_plain_mapping(text)
        solutions = {
            int(each["trial"]): {
                str(name): float(value) for name, value in each["best_evaluated_value"].items()
            }
            for each in content["solutions"]
        }
        maximize, minimize = (list(map(str, content[key])) for key in ("maximize", "minimize"))
    except (*PARSE_ERRORS, LookupError, TypeError, AttributeError) as error:
        raise DamagedFileError(path, f"it is not what a search writes ({error!r})") from error
    return StudyResults(maximize, minimize, solutions)


def trial_numbers(setting: Setting) -> list[int]:
    """Return the numbers of the trials in ``setting``, from their folders' names; [] in a sweep."""
    names = (run.folder.name.partition(",")[0] for run in setting.runs)
    return [int(name) for name in names if name.isdecimal()]


def write_sweep_report(
    sweep_dir: Path, settings: Sequence[Setting], tried: Tried | None = None
) -> Path:
    """Write the report of a sweep or a search to its folder; return the path of the page."""
    path = sweep_dir / SWEEP_REPORT
    study = read_study_results(sweep_dir)
    page = sweep_page(f"{'Search' if study else 'Sweep'} {sweep_dir.name}", settings, study, tried)
    write_text_atomically(path, page)
    return path


def sweep_page(
    title: str,
    settings: Sequence[Setting],
    study: StudyResults | None = None,
    tried: Tried | None = None,
) -> str:
    """Return the HTML that compares settings: solutions of ``study`` first, then by objective.

    The order stays as it is if the settings answer different questions (``describe_unlikeness``).
    """
    runs = [run for setting in settings for run in setting.runs]
    done = [(n, setting) for n, setting in enumerate(settings) if setting.finished_runs()]
    unlike = describe_unlikeness([setting for _, setting in done])
    if not unlike:
        done.sort(key=lambda each: -each[1].estimates()["objective"].mean)
        if study is not None:
            done.sort(key=lambda each: not study.has_solution(each[1]))
    shown = [*(s for _, s in done), *(s for s in settings if not s.finished_runs())]
    left_out = [run.folder.name for run in runs if not run.measures]
    counted = f"{len(runs) - len(left_out)} of {len(runs)} runs have finished"
    comparison = compare_with_first(settings, tried)
    verdict = Headline(unlike, is_doubtful=True, has_best=False)
    if not unlike:
        verdict = _headline(done, comparison, study)
    if done and describe_doubts(done[0][0] + 1, done[0][1]):
        text = f"{verdict.text}; there are reasons to doubt its runs"
        verdict = verdict._replace(text=text, is_doubtful=True)
    return render_template(
        "sweep.html",
        scripts=["sweep.js"],
        title=title,
        verdict=verdict,
        subtitle=f"{counted}, without {', '.join(left_out)}" if left_out else counted,
        curves=setting_curves(shown),
        tiles=[*_tiles(done, comparison)] if verdict.has_best and done[1:] and not study else [],
        is_ranked=not unlike,
        notes=list(note_lines(shown, comparison)),  # numbered as in tables and charts
        **_tables_and_charts(done, comparison, study),
    )


def _headline(
    done: Sequence[Ranked], comparison: SettingsComparison, study: StudyResults | None
) -> Headline:
    """Return the headline: the solutions of a search, or the best setting and its verdict."""
    if not done:
        return Headline("No run has finished.", is_doubtful=True)
    if study is not None:
        return Headline(study.headline, is_doubtful=not study.solutions)
    goal = _objective_title(comparison)
    rivals = [n for n, setting in done if setting is not comparison.baseline]
    verdicts = [comparison.verdict(n, goal) for n in rivals]
    objectives = {setting.estimates()["objective"].mean for _, setting in done}
    tie_reason = "all objectives are equal" if len(done) > len(objectives) == 1 else ""
    if reason := DOUBTS[""] if "" in verdicts else tie_reason:
        text = f"{reason}: none of {len(done)} settings is best"
        return Headline(text, is_doubtful=True, has_best=False)
    number, best = done[0]
    name = _short_name(best)
    reached = f"{goal} {best.reached_text('objective')}"
    if len(done) == 1:
        return Headline(f"{name}: {reached}", is_doubtful=False)
    if best is not comparison.baseline:
        verdict = comparison.verdict(number, goal)
        ending = DOUBTS.get(verdict, f"{verdict} than the baseline")
        is_doubtful = verdict in DOUBTS
    else:
        doubtful = [verdict for verdict in verdicts if verdict != "lower"]
        ending = DOUBTS.get(doubtful[0], doubtful[0]) if doubtful else "higher than all others"
        is_doubtful = bool(doubtful)
        number, unclear = done[1][0], f"from {len(doubtful)} of {len(verdicts)} others"
        ending = ending.replace("from the baseline", unclear)
    if isinstance(more := comparison.more_seeds(number, goal), int):
        ending += f" with these seeds; {more} more of each setting may detect one"
    word = "leads, but may not be better" if is_doubtful else "is best"
    if best.estimates()["objective"].mean < best.start("objective"):
        word = "fell least" + ", but may not be better" * is_doubtful
    return Headline(f"{name} {word}: {reached}; {ending}", is_doubtful)


def _short_name(setting: Setting) -> str:
    """Return the setting's label or, if it is long, the name of its first run."""
    return setting.label if len(setting.label) <= LONGEST_NAME else setting.runs[0].folder.name


def _tiles(done: Sequence[Ranked], comparison: SettingsComparison) -> Iterator[Tile]:
    """Yield tiles with the best setting's objective, its lead and its KL.

    The best is compared with the baseline or, if it is the baseline, with the next best.
    """
    (number, best), (compared, rival) = done[:2]
    goal, rival_name, sign = _objective_title(comparison), "next best", -1
    if best is not comparison.baseline and comparison.baseline is not None:
        compared, rival, rival_name, sign = number, comparison.baseline, "baseline", 1
    start, reached = best.start("objective"), f"{best.estimates()['objective'].mean:.3f}"
    before = "" if math.isnan(start) else f"{start:.3f}"
    meaning = MEANINGS.get(goal) or best.runs[0].meanings.get("objective", goal)
    note = f"{meaning}; {rival_name} {_short_name(rival)}: {rival.reached_text('objective')}"
    yield Tile(f"{goal}, {'start → ' if before else ''}best", before, reached, note)
    if (difference := comparison.differences.get((compared, goal))) is not None:
        estimate, size = difference.estimate, difference.fewest_seeds
        paired = ", paired by seed" if estimate.size == size else ""
        seeds = f"{size} seed{'s' * (size > 1)} of each setting{paired}"
        note = f"no interval from {seeds}"
        if not math.isnan(estimate.half):
            corrected = f"corrected for {comparison.num_tests} differences"
            note = f"alone ± {estimate.half:.4f} (95 %, {seeds}); the verdict is {corrected}"
        unclear = f", {UNCLEAR}" if comparison.verdict(compared, goal) == "-" else ""
        lead = f"{sign * estimate.mean:+.4f}{unclear}"
        yield Tile(f"lead over the {rival_name}", "", lead, note)
    estimates = [setting.estimates() for setting in (rival, best)]
    if all(KL in by_title for by_title in estimates):
        before, after = (number_text(by_title[KL].mean) for by_title in estimates)
        yield Tile(f"KL, {rival_name} → best", before, after, "nats from the model before PPO")


def describe_doubts(number: int, setting: Setting) -> str:
    """Return a sentence on the doubtful runs of a setting, with a reason; "" if there are none."""
    doubted = {}
    for run in setting.finished_runs():
        lines = [doubt.line for doubt in read_doubts(run.folder)]
        result = read_run_result(run.folder)
        gain = None if result is None else read_gain(result["phases"])
        lines += [] if gain is None or gain.is_proven else [gain.text]
        if lines:
            doubted[run.folder.name] = lines[0]
    if not doubted:
        return ""
    name, line = next(iter(doubted.items()))
    return (
        f"{len(doubted)} of {len(setting.runs)} runs of setting {number} "
        f"{'gives' if len(doubted) == 1 else 'give'} reason for doubt; {name}: {line}"
    )


def _objective_title(comparison: SettingsComparison) -> str:
    """Return "objective", or the measure that it repeats, for which it is hidden."""
    return next(title for title in ("objective", "gold", "score") if title in comparison.titles)


def _tables_and_charts(
    ranked: Sequence[Ranked], comparison: SettingsComparison, study: StudyResults | None
) -> dict[str, Any]:
    """Return the table of settings with finished runs (None without any), and charts over KL."""
    done = [setting for _, setting in ranked]
    titles = [title for title in comparison.titles if all(title in s.estimates() for s in done)]
    comparable = [title for title in titles if title not in comparison.left_out]
    goals = [goal for goal in GOALS if goal in comparable and KL in titles and len(done) > 1]
    return {
        "table": _settings_table(ranked, titles, comparison, study) if ranked else None,
        "frontiers": [frontier_chart(goal, done) for goal in goals],
    }


def _settings_table(
    done: Sequence[Ranked],
    titles: Sequence[str],
    comparison: SettingsComparison,
    study: StudyResults | None,
) -> dict[str, Any]:
    """Return the titles of measures and of the last column, and a row for each setting."""
    goal, rows = _objective_title(comparison), []
    for number, setting in done:
        if study is not None:
            verdict = "solution" if study.has_solution(setting) else ""
        elif setting is comparison.baseline:
            verdict = "baseline"
        else:
            verdict = comparison.verdict_text(number, goal)
        counted = f"{len(setting.finished_runs())} of {len(setting.runs)}"
        measures = [
            text if text == NOT_COMPARED else setting.reached_text(title)
            for title in titles
            for text in [comparison.verdict_text(number, title)]
        ]
        trials = ", ".join(map(str, trial_numbers(setting))) if study else ""
        label = f"trial {trials}: {setting.label}" if trials else setting.label
        rows.append({"label": label, "runs": counted, "measures": measures, "verdict": verdict})
    last = "" if study else f"{goal}, minus the baseline"
    return {"titles": titles, "last": last, "rows": rows}
