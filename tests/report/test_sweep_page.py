"""The report of a sweep: what it shows is what the runs reached."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import yaml

from rlhf.base.intervals import t_quantile
from rlhf.base.stored_files import DamagedFileError
from rlhf.report.compare_runs import (
    STUDY_RESULTS,
    read_study_results,
    sweep_page,
    write_sweep_report,
)
from rlhf.report.comparison import ComparedRun, Setting, group_runs_by_setting
from rlhf.report.sweep_charts import frontier_chart
from tests.browser import needs_chromium, show
from tests.report.test_run_page import RESULT

EVIL = "</title><script>alert(1)</script>"


def runs(num_seeds: int = 3, estimator: str = "gae") -> list[ComparedRun]:
    """Return runs whose gold score depends on kl_ctl, and a little on the seed."""
    draws = random.Random(1)
    found = []
    for kl_ctl in (0.02, 0.1, 0.5):
        for seed in range(1, num_seeds + 1):
            gold = 0.9 - abs(kl_ctl - 0.1) + 0.01 * draws.random()
            measures = {"objective": gold, "gold": gold, "score": 2 - kl_ctl, "tokens": 9.0}
            measures |= {"KL, nats": 2 - 3 * kl_ctl, "minutes": 1.0}
            keys = {"seed": seed, "ppo.kl_ctl": kl_ctl, "ppo.advantage_estimator": estimator}
            starts = {"objective": 0.82, "gold": 0.82}
            found.append(ComparedRun(Path(f"{kl_ctl}-{seed}"), keys, measures, starts))
    return found


def test_page_begins_with_the_best_setting() -> None:
    text = sweep_page("kl", group_runs_by_setting(runs()))
    assert re.search(
        r'class="verdict">ppo\.kl_ctl=0\.1 is best: gold 0\.820 → 0\.90\d ± 0\.\d+; higher than',
        text,
    )
    rows = re.findall(r'<th scope="row">(ppo\.kl_ctl=[\d.]+)</th>', text)
    assert rows == ["ppo.kl_ctl=0.1", "ppo.kl_ctl=0.02", "ppo.kl_ctl=0.5"]
    told = re.findall(r'<td class="told">([^<]*)', text)
    assert told == ["higher", "baseline", "lower"]
    assert "3 of 3 settings tried on this question are compared; corrected for 2" in text
    assert "9 of 9 runs have finished" in text
    tiles = re.findall(r"<dt>(.*?)</dt><dd>(?:<span.*?>(.*?) →</span> )?(.*?)</dd>", text)
    assert [tile[0] for tile in tiles] == [
        *("gold, start → best", "lead over the baseline", "KL, baseline → best"),
    ]
    assert tiles[0][1:] == ("0.820", "0.904")
    assert re.fullmatch(r"\+0\.07\d\d", tiles[1][2])
    told = r"alone ± 0\.0\d{3} \(95 %, 3 seeds of each setting, paired by seed\); the verdict is"
    assert re.search(told, text)
    assert tiles[2][1:] == ("1.94", "1.7")
    assert "baseline ppo.kl_ctl=0.02: 0.820 → 0.82" in text
    assert re.search(r'<td class="number">0\.820 → 0\.90\d ± 0\.0', text)
    for title in ("Gold over KL", "Score over KL"):
        assert title in text
    assert "Exactly right over KL" not in text, "not measured"


def test_the_reference_leads_the_next_best_and_runs_of_the_best_are_doubted(tmp_path: Path) -> None:
    first = [run._replace(folder=tmp_path / run.folder) for run in runs() if "0.02" not in str(run)]
    alarm = {"phase": "ppo", "step": 3, "name": "clipping", "metric": "ppo/clipfrac", "value": 1}
    for run in first[:2]:
        run.folder.mkdir()
        text = json.dumps(alarm | {"advice": "Look <here>."})
        (run.folder / "alarms.jsonl").write_text(text + "\n")
    with_worse_first = sweep_page("kl", group_runs_by_setting([runs()[0], *first]))
    assert "2 of 3 runs of setting 1 give" in with_worse_first, "numbered as in the tables"
    page = sweep_page("kl", group_runs_by_setting(first))
    best = "ppo.kl_ctl=0.1 is best: gold 0.820 → 0.904 ± 0.003; higher than all others"
    assert f'doubtful">{best}; there are reasons to doubt its runs' in page
    assert re.search(r"<dt>lead over the next best</dt><dd>\+0\.39\d\d</dd>", page)
    told = "2 of 3 runs of setting 1 give reason for doubt; 0.1-1: "
    assert f"{told}alarm clipping" in page
    assert "Look &lt;here&gt;." in page
    (first[0].folder / "alarms.jsonl").unlink()
    ppo = RESULT["phases"]["ppo"] | {"exact_gain_ci": [-0.1, 0.1]}
    (first[0].folder / "result.json").write_text(json.dumps(RESULT | {"phases": {"ppo": ppo}}))
    page = sweep_page("kl", group_runs_by_setting(first))
    assert f"{told}no measurable change: exactly right 50.0% → 50.0%" in page


def test_settings_that_cannot_be_told_apart_are_called_so() -> None:
    doubtful = sweep_page("kl", group_runs_by_setting(runs(num_seeds=1)))
    assert "; one seed is not enough" in doubtful
    draws = random.Random(2)
    equal = [run._replace(measures={"objective": draws.gauss(0, 1)}) for run in runs()]
    text = sweep_page("kl", group_runs_by_setting(equal))
    assert re.search("; no difference from (the baseline|2 of 2 others) can be detected", text)
    assert re.search(r"lead over the \w+( best)?</dt><dd>\+\d\.\d{4}, unclear</dd>", text)
    worse = [run._replace(starts={"objective": 0.95, "gold": 0.95}) for run in runs()]
    assert "ppo.kl_ctl=0.1 fell least: gold 0.950 → 0.90" in sweep_page(
        "kl", group_runs_by_setting(worse)
    )
    same = [run._replace(measures={"objective": 0.0}) for run in runs()]
    assert "all objectives are equal: none of 3 settings" in (
        text := sweep_page("kl", group_runs_by_setting(same))
    )
    assert not re.search("is best: |class=.tiles", text)


def test_objectives_of_other_meaning_have_no_best_and_no_frontier() -> None:
    meanings = {"objective": "the score", "score": "of reward model 1"}
    settings = [
        run._replace(
            measures={k: v for k, v in run.measures.items() if k != "gold"},
            meanings={k: f"{v}{i}" for k, v in meanings.items()},
        )
        for i, run in enumerate(runs())
    ]
    text = sweep_page("unlike", group_runs_by_setting(settings))
    assert "none of 3 settings is best" in text
    assert "not compared: score" in text
    assert text.count('<td class="number">not compared</td>') == 2 * 3, "score and objective"
    for title in ("is best: ", "Score over KL"):
        assert title not in text


def test_runs_of_other_data_are_no_fair_comparison() -> None:
    def page(*varied: str) -> str:
        different = [
            run._replace(keys=run.keys | {key: run.keys["ppo.kl_ctl"] for key in varied})
            for run in runs()
        ]
        return sweep_page("unlike", group_runs_by_setting(different))

    told = "Not a fair comparison: 5 keys differ (data.size, ppo.kl_ctl, a, b, ...), data or model"
    unlike = page("a", "b", "c", "data.size")
    assert f'doubtful">{told} among them</p>' in unlike
    assert not re.search("is best|class=.tiles|the best first", unlike)
    assert re.findall(r'row">.*ppo.kl_ctl=([\d.]+)', unlike) == ["0.02", "0.1", "0.5"]
    for varied in (("a", "b", "c"), ("data.size",)):
        assert "Not a fair" not in page(*varied), "presets, and two keys of a grid, are compared"


def test_interval_that_leaves_the_possible_range_is_not_drawn() -> None:
    def spread(far: float) -> Setting:
        measures = ({"gold": 0.9 + d, "KL, nats": 0.5 + d} for d in (-far, 0.0, far))
        return Setting({}, [ComparedRun(Path(), {"seed": 1}, each) for each in measures])

    settings = [spread(0.02), spread(0.3)]
    chart = frontier_chart("gold", settings)
    assert chart is not None
    drawn = chart.data["lines"][1]
    half = pytest.approx(t_quantile(2) * 0.02 / 3**0.5, rel=1e-5)
    assert (drawn["half"], drawn["xHalf"]) == ([half, 0], [half, 0])
    assert chart.note == "Intervals that contain impossible values are not drawn: 2."
    assert "KL" in chart.data["xLabel"]


def test_keys_that_change_together_have_a_short_headline() -> None:
    trials = [
        ComparedRun(
            Path(f"{n}"),
            {"seed": 1, **{f"ppo.a_long_name_of_a_key_{k}": n for k in range(3)}},
            {"objective": float(n), "gold": float(n), "KL, nats": 1.0 + n},
        )
        for n in range(2)
    ]
    page = sweep_page("x", group_runs_by_setting(trials))
    assert "1 leads, but may not be better: gold 1.000; one seed is not enough" in page
    assert "no interval from 1 seed of each setting" in page


STUDY = """
name: optuna
maximize: [ppo.gold_after]
minimize: [ppo.kl_after]
solutions:
- trial: 2
  best_evaluated_value: {ppo.gold_after: 0.0, ppo.kl_after: 0.7}
- trial: 0
  best_evaluated_value: {ppo.gold_after: 0.2, ppo.kl_after: 2.7}
"""


def trials_of_search() -> list[ComparedRun]:
    """Return three trials; two are on the front of STUDY."""
    return [
        ComparedRun(
            Path(f"{n:03d},ppo.kl_ctl={kl}"),
            {"seed": 1, "ppo.kl_ctl": kl},
            {"objective": gold, "gold": gold, "KL, nats": nats},
        )
        for n, (kl, gold, nats) in enumerate([(0.02, 0.2, 2.7), (0.1, 0.0, 1.9), (0.5, 0.0, 0.7)])
    ]


def test_page_of_a_search_names_its_objectives_and_solutions(tmp_path: Path) -> None:
    (tmp_path / STUDY_RESULTS).write_text(STUDY)
    text = write_sweep_report(tmp_path, group_runs_by_setting(trials_of_search())).read_text()
    goals = "ppo.gold_after (higher) and ppo.kl_after (lower)"
    assert f"Pareto front of {goals}: trials 2, 0" in text
    labels = re.findall(r'<th scope="row">(trial \d): ', text)
    assert labels == ["trial 0", "trial 2", "trial 1"], "solutions come first"
    told = re.findall(r'<td class="told">([^<]*)', text)
    assert told == ["solution", "solution", ""]


def test_ties_of_a_search_are_named(tmp_path: Path) -> None:
    one = {"name": "optuna", "maximize": ["ppo.gold_after"], "minimize": []}
    tied = [{"trial": n, "best_evaluated_value": {"ppo.gold_after": 0.0}} for n in (1, 2)]
    (tmp_path / STUDY_RESULTS).write_text(yaml.safe_dump(one | {"solutions": tied}))
    study = read_study_results(tmp_path)
    assert study is not None
    assert study.headline == "Best ppo.gold_after (higher) is 0: trials 1, 2 (tied)"
    (tmp_path / STUDY_RESULTS).write_text("solutions: [1]")
    with pytest.raises(DamagedFileError, match="not what a search writes"):
        read_study_results(tmp_path)


def test_unfinished_sweep_has_a_page(tmp_path: Path) -> None:
    none = [run._replace(measures={}) for run in runs()]
    assert "No run has finished." in sweep_page("kl", group_runs_by_setting(none))
    settings = group_runs_by_setting([*runs()[:4], *none[4:]])
    text = write_sweep_report(tmp_path, settings).read_text()
    names = [run.folder.name for each in settings for run in each.runs if not run.measures]
    assert f"4 of 9 runs have finished, without {', '.join(names)}" in text


def test_text_of_a_command_stays_text() -> None:
    mixed = [*runs(), *runs(estimator=EVIL)]
    text = sweep_page(EVIL, group_runs_by_setting(mixed))
    assert text.count("<script>") == 1, "the page's own"


@pytest.mark.slow
@needs_chromium
def test_browser_shows_the_page_without_a_fault(tmp_path: Path) -> None:
    path = write_sweep_report(tmp_path, group_runs_by_setting(runs()))
    shown = show(path, tmp_path, width=400)
    assert shown.complaints == []
    assert shown.faults == []
