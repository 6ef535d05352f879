"""The report of a sweep: what it shows is what the runs reached."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from rlhf.base.intervals import Estimate
from rlhf.report.comparison import ComparedRun, group_by_setting
from rlhf.report.sweep_charts import Place, parameter_chart, pareto_frontier
from rlhf.report.sweep_page import parameter_importances, sweep_page, write_sweep_report
from tests.browser import needs_chromium, show

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
            found.append(ComparedRun(Path(f"{kl_ctl}-{seed}"), keys, measures))
    return found


def at(setting: int, x: float, y: float) -> Place:
    return Place(setting, str(setting), Estimate(x, 0.1, 3), Estimate(y, 0.1, 3))


def test_frontier_has_what_nothing_beats() -> None:
    places = [at(0, 1.0, 0.5), at(1, 2.0, 0.4), at(2, 3.0, 0.9), at(3, 1.0, 0.6), at(4, 4.0, 0.9)]
    assert [place.setting for place in pareto_frontier(places)] == [3, 2]


def test_page_begins_with_the_best_setting() -> None:
    text = sweep_page("kl", group_by_setting(runs()))
    assert re.search(
        r'class="verdict">best objective 0\.90\d ± 0\.\d+: ppo\.kl_ctl=0\.1; high', text
    )
    rows = re.findall(r'<th scope="row">(ppo\.kl_ctl=[\d.]+)</th>', text)
    assert rows == ["ppo.kl_ctl=0.1", "ppo.kl_ctl=0.02", "ppo.kl_ctl=0.5"]
    assert "9 of 9 runs have finished" in text
    for title in ("Gold over KL", "Score over KL", "Parallel coordinates", "ppo.kl_ctl: gold"):
        assert title in text
    assert "Exactly right over KL" not in text, "not measured"


def test_settings_that_cannot_be_told_apart_are_called_so() -> None:
    doubtful = sweep_page("kl", group_by_setting(runs(num_seeds=1)))
    assert "; one seed only" in doubtful
    draws = random.Random(2)
    equal = [run._replace(measures={"objective": draws.gauss(0, 1)}) for run in runs()]
    assert "; no difference from the second best can be told" in sweep_page(
        "kl", group_by_setting(equal)
    )


def test_importance_is_the_share_that_a_key_explains() -> None:
    found = parameter_importances(runs(), ["ppo.kl_ctl", "seed"], "gold").of_parameter
    assert found["ppo.kl_ctl"] > 0.95
    assert found["seed"] == pytest.approx(0, abs=0.01)
    assert not parameter_importances(runs(), ["ppo.advantage_estimator"], "gold").of_parameter


def test_chance_explains_nothing() -> None:
    draws, shares = random.Random(3), []
    for _ in range(200):
        values = [run._replace(measures={"gold": draws.gauss(0, 1)}) for run in runs()]
        shares.append(
            parameter_importances(values, ["ppo.kl_ctl"], "gold").of_parameter["ppo.kl_ctl"]
        )
    assert sum(shares) / len(shares) < 0.15, "without the correction 2 of 8 degrees: 0.25"


def test_unfinished_sweep_has_a_page(tmp_path: Path) -> None:
    none = [run._replace(measures={}) for run in runs()]
    assert "No run has finished." in sweep_page("kl", group_by_setting(none))
    path = write_sweep_report(tmp_path, group_by_setting([*runs()[:4], *none[4:]]))
    assert "4 of 9 runs have finished" in path.read_text()


def test_text_of_a_command_stays_text() -> None:
    mixed = [*runs(), *runs(estimator=EVIL)]
    text = sweep_page(EVIL, group_by_setting(mixed))
    assert text.count("<script>") == 1, "the page's own"


def test_many_values_of_a_parameter_are_drawn_over_their_logarithm() -> None:
    values = [0.01 * 1.5**n for n in range(12)]
    chart = parameter_chart("ppo.kl_ctl: gold", values, [Estimate(1.0 + v, 0.1, 1) for v in values])
    assert chart is not None
    assert [label for _, label in chart.data["ticks"]] == ["0.01", "0.1"]


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1400, True), (400, False)])
def test_browser_shows_the_page_without_a_fault(width: int, dark: bool, tmp_path: Path) -> None:
    path = write_sweep_report(tmp_path, group_by_setting(runs()))
    shown = show(path, tmp_path, width=width, dark=dark)
    assert shown.console == []
    assert shown.faults == []


@pytest.mark.slow
@needs_chromium
def test_picked_setting_is_marked_among_parallel_lines(tmp_path: Path) -> None:
    path = write_sweep_report(tmp_path, group_by_setting(runs()))
    click = '<script>document.querySelector("button[data-pick]").click()</script></body>'
    path.write_text(path.read_text().replace("</body>", click))
    document = show(path, tmp_path).document
    pressed = re.findall(r'<button[^>]*aria-pressed="true"[^>]*>', document)
    assert len(pressed) == 1
    parts = re.findall(r"<[^>]*data-setting[^>]*>", document)
    marked = [part for part in parts if "picked" in part]
    assert all('data-setting="0"' in part for part in marked)
    assert [part[:5] for part in marked] == ["<poly"]
