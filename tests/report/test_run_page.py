"""The report of a run: whole, self-contained, and safe with any text of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.base.errors import CheckpointError
from rlhf.base.stored_files import METRICS as METRICS_FILE
from rlhf.base.stored_files import read_json_lines
from rlhf.config.freeze import to_run_config, write_command, write_frozen_config
from rlhf.config.schema.run import AlarmName
from rlhf.report import __main__ as report
from rlhf.report.run_charts import describe_scores
from rlhf.report.run_page import write_report
from rlhf.run.metric_table import METRICS
from rlhf.run.step_alarms import Alarm
from tests.browser import needs_chromium, show, tab
from tests.conftest import Compose
from tests.documents import read_document

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path, compose: Compose) -> Made:
    """Write a run directory by hand, with as many steps as asked for."""

    def make(
        steps: int = 12,
        *,
        finished: bool = True,
        response: str = "ok",
        values: Sequence[float] = (0.0, 0.0),
        averaged: bool = False,
    ) -> Path:
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        write_frozen_config(to_run_config(compose(["name=pets"])), run_dir)
        names = [name for name in METRICS if not name.startswith(("sft", "reward", "dpo"))]
        lines = [
            {"phase": "ppo", "step": n, **{name: 0.1 * ((n * 7) % 10) for name in names}}
            for n in range(1, steps + 1)
        ]
        lines.insert(0, {"phase": "sft", "step": 1, "sft/loss": None})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run_dir / "metrics.jsonl").write_text(text + '{"phase": "ppo", "st')
        samples = [
            {
                "phase": "ppo",
                "step": step,
                "prompt": f"{n}\u2028?",
                "response": f"{response} {step}",
            }
            | {"ended": True, "score": 0.5 * n, "gold": 0.25, "gold_parts": {}, "kl": 0.1}
            | {"token_texts": [response, f" {step}"], "token_kl": [0.1, -0.2], "model": "actor"}
            | {"token_values": values, "token_advantages": [0.5, 1.0]}
            | {"token_rewards": [-0.01, 0.52]}
            for step in (0, steps)
            for n in range(3)
        ]
        if averaged:
            samples += [{**last, "model": "actor_ema", "score": 9.0} for last in samples[-3:]]
        text = "".join(json.dumps(sample) + "\n" for sample in samples)
        (run_dir / "samples.jsonl").write_text(text)
        alarm = Alarm("ppo", 3, AlarmName.clipping, "ppo/clipfrac", 0.5, "Lower <it>.")
        (run_dir / "alarms.jsonl").write_text(json.dumps(alarm._asdict()) + "\n")
        if finished:
            (run_dir / "result.json").write_text(json.dumps(RESULT))
        return run_dir

    return make


PPO: dict[str, Any] = {
    f"{name}_{when}": 0.5
    for name in ("score", "gold", "exact", "exact_greedy", "response_tokens", "ended_share")
    for when in ("before", "after")
}
RESULT = {
    "objective": 0.5,
    "phases": {
        "ppo": PPO
        | {"kl_to_reference": 1.0, "seconds": 3.0, "score_gain_ci": [-0.1, 0.1]}
        | {"gold_parts_before": {}, "gold_parts_after": {}}
        | {"measured": {"hours": 0.1, "memory_gib": 1.0}}
    },
    "versions": {"torch": "2"},
    "measured": {"hours": 0.1, "memory_gib": 1.0},
}


class Page(HTMLParser):
    """Element names, attributes and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in {"meta", "input"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "elements are closed in order"


def test_page_is_whole_and_loads_nothing(made: Made) -> None:
    page = Page(write_report(made()))
    assert page.open == []
    assert page.tags.count("figure") > 30
    assert len(page.ids) == len(set(page.ids))
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    links = [value or "" for name, value in page.attributes if name in {"href", "src", "data"}]
    assert links
    assert all(link.startswith("#") and link[1:] in page.ids for link in links)
    style = re.search(r"<style>(.*?)</style>", (made() / "report.html").read_text(), re.DOTALL)
    assert style is not None
    assert not re.search(r"url\(|@import", style[1])


def test_text_of_a_model_stays_text(made: Made) -> None:
    path = write_report(made(response=EVIL))
    text, page = path.read_text(), Page(path)
    assert page.tags.count("script") == 2, "the data and the page's own script"
    assert "img" not in page.tags
    data = re.search(r'id="samples">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["held-out prompts"][0]["response"] == f"{EVIL} 0"
    assert "Lower &lt;it&gt;." in text


def test_verdict_alarms_command_and_settings_are_shown(made: Made) -> None:
    run_dir = made()
    write_command(["ppo.kl_ctl=0.1", "name=a b"], run_dir)
    text = write_report(run_dir).read_text()
    assert "<pre>python launch.py ppo.kl_ctl=0.1 'name=a b'</pre>" in unescape(text)
    assert '<th scope="row">name</th><td>"pets"</td>' in unescape(text)
    assert 'doubtful">no interval: exactly right 50.0% → 50.0%; 3 reasons to doubt it</p>' in text
    assert '<li id="alarm-clipping">alarm clipping: ppo/clipfrac=0.5 at ppo step 3.' in text
    assert 'href="#alarm-clipping"' in text


def test_first_screen_answers_whether_the_run_was_good(made: Made) -> None:
    run_dir = made()
    path = run_dir / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["gold"] = [0.0, -0.5, 0.25][int(row["prompt"][0])] * (row["step"] > 0)
        row["score"] = int(row["prompt"][0]) * row["step"]  # of another order
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "ppo").mkdir()
    (run_dir / "ppo" / "held_out.json").write_text(json.dumps({"before": {"score": [1.0] * 700}}))
    (run_dir / "command.txt").write_text("python launch.py data=local seed=1 run_dir=a ppo.lam=1\n")
    text = write_report(run_dir).read_text()
    parts = (
        *("<h1>data=local ppo.lam=1, seed 1</h1>", 'class="verdict', 'class="tiles"'),
        *("Reasons to doubt", "Answers before and after", "<h2>PPO</h2>", "<summary>Samples (6)"),
        *("<summary>Results", "<summary>PPO: health", "<summary>Settings"),
    )
    places = [text.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)
    tiles = re.findall(r"<dt>(.*?)</dt><dd>(?:<span.*?>(.*?) →</span> )?(.*?)</dd>", text)
    assert tiles[1:3] == [("score", "0.500", "0.500"), ("KL, nats", "", "1")]
    assert ">share of the answers without a mistake; 700 held-out prompts</dd>" in text
    changed = text.partition("Answers before and after")[2].partition("<h2>PPO</h2>")[0]
    told = "3 of the 700 held-out prompts have samples: by gold, 1 higher, 1 lower, 1 the same;"
    assert told in changed
    assert re.findall(r"<h3>(\d)", changed) == ["1", "2", "0"], "the largest change first"
    others = ["Response length", "Entropy", "Clip fraction"]
    assert main_charts(text) == ["Score", "Gold score", "KL to the reference", *others]
    assert "<figcaption>Reward after the" in text.partition("<summary>PPO: reward</summary>")[2]
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(re.sub(r'"ppo/eval_(gold|exact)": [\d.]+, ', "", metrics.read_text()))
    without_gold = main_charts(write_report(run_dir).read_text())
    assert without_gold == ["Score", "KL to the reference", *others, "Reward after the KL penalty"]


def main_charts(page: str) -> list[str]:
    """Return the titles of the charts that a run's page shows unfolded."""
    main = page.partition("<h2>PPO</h2>")[2].partition("</section>")[0]
    return re.findall(r"<figcaption>([^<]*?) <", main)


def test_verdict_of_a_good_run_has_no_doubt(made: Made) -> None:
    run_dir = made()
    for name in ("alarms.jsonl", "metrics.jsonl"):
        (run_dir / name).unlink()
    good = {"exact_gain_ci": [0.1, 0.3], "ended_share_after": 1.0, "response_tokens_after": 9.0}
    good |= {"response_tokens_before": 9.0}
    phases = {"ppo": RESULT["phases"]["ppo"] | good}
    (run_dir / "result.json").write_text(json.dumps(RESULT | {"phases": phases}))
    text = write_report(run_dir).read_text()
    assert '<p class="verdict">better: exactly right 50.0% → 50.0% (95 % interval of' in text


def lines_drawn(run_dir: Path, metrics: list[dict[str, Any]], title: str) -> list[dict[str, Any]]:
    """Write the metrics of a run and its page; return the lines of the chart below ``title``."""
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    figure = write_report(run_dir).read_text().partition(title)[2].partition("</figure>")[0]
    drawn = re.search("data-chart='(.*?)'", figure)
    assert drawn
    return list(json.loads(unescape(drawn[1]))["lines"])


def test_a_line_that_is_switched_off_is_not_drawn(made: Made) -> None:
    run_dir = made()
    lines = [
        {"phase": "ppo", "step": n, "ppo/clipfrac": 0.0, "ppo/value_clipfrac": 0.0}
        | {"ppo/dual_clipfrac": 0.1}
        for n in range(1, 5)
    ]
    drawn = lines_drawn(run_dir, lines, "Clip fraction")
    assert [each["label"] for each in drawn] == ["policy", "dual"]


def test_run_that_has_not_finished_has_a_report(made: Made) -> None:
    run_dir = made(finished=False)
    (run_dir / "sft").mkdir()
    (run_dir / "sft" / "result.json").write_text("{}")
    text = write_report(run_dir).read_text()
    assert "This run has not finished; finished phases: sft" in text
    assert "Clip fraction" in text
    for name in ("metrics.jsonl", "samples.jsonl", "alarms.jsonl"):
        (run_dir / name).unlink()
    assert "This run has not finished" in write_report(run_dir).read_text()


def test_thousands_of_steps_fit_into_three_megabytes(made: Made) -> None:
    path = write_report(made(3_000))
    assert path.stat().st_size < 3 * 2**20


def test_command_writes_the_report(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = made()
    assert report.main([str(run_dir)]) == 0
    assert f"wrote {run_dir / 'report.html'}" in capsys.readouterr().out
    assert report.main([str(run_dir.parent / "none")]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert report.main([str(run_dir), "--json"]) == 0
    found = read_document("report", capsys.readouterr().out)
    assert found["page"] == str(run_dir / "report.html")
    assert [alarm["name"] for alarm in found["alarms"]]
    with pytest.raises(CheckpointError, match=r"it has no config\.yaml"):
        write_report(run_dir.parent)


@pytest.mark.slow
@needs_chromium
def test_browser_shows_the_page_without_a_fault(made: Made, tmp_path: Path) -> None:
    page = write_report(made(response=EVIL, averaged=True))
    shown = show(page, tmp_path, width=400, dark=True)
    assert shown.complaints == []
    assert shown.faults == []
    assert "3 of 3 prompts" in shown.document
    assert "&lt;img src=x" in shown.document
    assert shown.document.count('>12, average</td><td class="number">9.00<') == 3
    assert "with scores from 9" not in shown.document, "the histogram is of the actor's answers"


@pytest.mark.slow
@needs_chromium
def test_tokens_of_an_answer_are_read_step_by_step(made: Made, tmp_path: Path) -> None:
    path = write_report(made(response="a b", values=(0.25, -0.001)))
    steps = "[...document.querySelectorAll('.answers td:first-child.number')]"
    answers = f"{steps}.map((each) => each.innerText)"
    cells = "[...document.querySelector('table.tokens').rows].map((row) => row.innerText)"
    with tab(tmp_path, f"file://{path}") as page:
        page.wait_for(f"{answers}.length === 6")
        # unfolds them
        page.run("document.querySelector('.note a[href=\"#samples-title\"]').click()")
        # answers of one step stand in columns; words that the answer before lacks are marked
        marked = "[...document.querySelectorAll('.answers mark')].map((each) => each.innerText)"
        assert page.run(marked) == [" 12"] * 3
        assert page.run("document.querySelector('.changed mark').innerText") == " 12"
        assert page.run("document.querySelector('.changed del').innerText") == " 0"
        # the slider begins at the last step; the open table follows it
        page.run("document.getElementById('every-step').click()")
        page.run("document.getElementById('tokens-0').click()")
        assert page.run("document.activeElement.id") == "tokens-0"
        assert page.run(answers) == ["12"] * 3
        move = "step.value = 0; step.dispatchEvent(new Event('input'))"
        page.run(f"const step = document.getElementById('step'); {move}")
        assert page.run(answers) == ["0"] * 3
        assert page.run(cells) == [
            "\tsum\ta·b\t·0",
            "reward\t0.51\t-0.01\t0.52",
            "KL\t-0.10\t0.10\t-0.20",
            "ratio\t\t1.11\t0.82",
            "value\t\t0.25\t0.00",
            "advantage\t\t0.50\t1.00",
        ]
        # each bar has its number of prompts, and a score below it
        bars = "[...document.querySelectorAll('.bar')].map((bar) => bar.innerText)"
        assert page.run(bars)[::6] == ["1\n0.00", "1\n0.50"]


@pytest.mark.slow
@needs_chromium
def test_rollouts_of_a_step_stand_side_by_side(made: Made, tmp_path: Path) -> None:
    run_dir = made()
    lines = [
        {"phase": "ppo", "step": step, "prompt": f"Human: {step}{group}?\n\nAssistant:"}
        | {"response": f"{number}", "ended": True, "score": 1.0 * number, "kl": 0, "tokens": 3.0}
        for step in (4, 8)
        for group in "ab"
        for number in range(3)
    ]
    (run_dir / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cards = "[...document.querySelectorAll('#browser .prompt')].map((each) => each.innerText)"
    bars = "[...document.querySelectorAll('.bar .number')].map((bar) => bar.innerText).join('')"
    with tab(tmp_path, f"file://{write_report(run_dir)}") as page:
        page.wait_for(f"{cards}.length === 3")
        page.run("document.querySelector('a[href=\"#samples-title\"]').click()")
        page.run("source.selectedIndex = 1; source.dispatchEvent(new Event('change'))")
        assert [card.split() for card in page.run(cards)] == [
            [f"8{group}?", "step", "score", "KL", "tokens", "answer"]
            + [word for n in range(3) for word in ("8", f"{n}.00", "0.00", "3", str(n))]
            for group in "ab"
        ]
        assert page.run(bars) == "222", "the scores of the step"
        page.run("step.value = 0; step.dispatchEvent(new Event('input'))")
        assert [card.split()[0] for card in page.run(cards)] == ["4a?", "4b?"]
        page.run("document.querySelector('a[data-step]').click()")
        assert "ok 0" in page.run(cards)[0], "an alarm's link shows the held-out prompts"


@pytest.mark.parametrize("has_gold", [True, False])
def test_over_optimisation_is_explained_by_the_gold_score_only_if_there_is_one(
    made: Made, *, has_gold: bool
) -> None:
    run_dir = made()
    path = run_dir / "metrics.jsonl"
    lines = list(read_json_lines(path, METRICS_FILE.form))
    for step, line in enumerate(lines):
        line |= {"ppo/kl_to_reference": 0.1 * step, "ppo/score_mean": 0.5, "ppo/eval_kl": 0.1}
        line.pop("ppo/eval_gold", None)
        if has_gold:
            line["ppo/eval_gold"] = 0.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(run_dir).read_text()
    assert ("PPO over-optimises" in page) == has_gold
    assert ("Gold, 0 to 1: by a rule that knows" in page) == has_gold
    assert ("Only the samples show" in page) != has_gold


def test_points_over_kl_keep_their_step_and_interval(made: Made) -> None:
    run_dir = made()
    values = {1: (0.04, 1.0), 2: (0.01, 2.0), 3: (0.09, 4.0)}  # KL and deviation of the scores
    lines = [
        {"phase": "ppo", "step": step, "ppo/score_mean": step, "ppo/score_std": std}
        | {"ppo/kl_to_reference": kl}
        for step, (kl, std) in values.items()
    ]
    (rollouts,) = lines_drawn(run_dir, lines, "Score that PPO maximises")
    assert rollouts["y"] == [2, 1, 3], "sorted by KL"
    assert [name[:6] for name in rollouts["names"]] == ["step 2", "step 1", "step 3"]
    assert rollouts["half"] == pytest.approx([1.96 * std / 128**0.5 for std in (2, 1, 4)], rel=1e-4)


def test_ppo_maximises_no_part_of_weight_0() -> None:
    weights = {"rewards.learned.weight": 1.0, "rewards.right.weight": 0}
    kinds = {"rewards.learned.kind": "model", "rewards.right.kind": "exact"}
    run: Any = SimpleNamespace(series={"ppo/score_mean": ()}, config=weights | kinds)
    assert describe_scores(run).startswith("Score: by 'learned' of rewards, which PPO")
