"""Runs from Python: what rlhf.launch stores, starts and refuses, and what rlhf.Run reads."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rlhf
from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.runs.notebook import Report, _name_function
from tests.runs import ROOT, python

NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
SMALLER = {  # the same run with a smaller model, and in three steps
    "sizes": ["experiment=smoke", "data.split=[2,6,2]", "reward.batch_size=256", "ppo.steps=3"],
    "again": ["phase=pipeline_rule", "experiment=smoke", "ppo.steps=2"],
}
CHECKS = """
assert repr(run.policy()) == f"LoadedPolicy('{run.run_dir}/ppo/actor')"
assert all(len(column) == len(run.metrics["step"]) for column in run.metrics.values())
assert set(run.samples[0]) >= {"prompt", "response", "step"}
names = sorted(path.name for path in (run.run_dir / "mine").iterdir())
assert names == ["actor", "critic"], names
for name in names:
    for file in (run.run_dir / "ppo" / name).iterdir():
        mine = run.run_dir / "mine" / name / file.name
        assert mine.exists(), mine
assert run.result["phases"]["ppo"]["steps"] == 3
assert set(short.result["phases"]["ppo"]["score_parts_after"]) == {"brief", "right"}
print("answer:", run.policy()("Is it open?", temperature=0))
print("same:", run.policy()("Is it open?", temperature=0))
"""


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """What a run sets for its process must not reach other tests."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.slow
def test_the_example_of_the_docs_runs(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "use.md").read_text().partition("## From Python")[2]
    (tmp_path / "example.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    ended = python("example.py", cwd=tmp_path, PYTHONPATH=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert "ppo/score_mean" in ended.stdout


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = rf"^({'|'.join(SMALLER)}) =.*"
    small = re.sub(names, lambda m: f"{m[1]} = {SMALLER[m[1]]}", "\n".join(code), flags=re.M)
    (tmp_path / "cells.py").write_text(f"{small}\n{CHECKS}")
    (tmp_path / "tutorial_data.py").symlink_to(NOTEBOOK.with_name("tutorial_data.py"))
    ended = python("cells.py", cwd=tmp_path, PYTHONPATH=ROOT)
    assert ended.returncode == 0, ended.stderr
    answers = [line.partition(": ")[2] for line in ended.stdout.splitlines()[-2:]]
    assert answers[0] == answers[1] != ""
    (rows,) = (tmp_path / "runs" / "inputs").glob("rows_*.jsonl")
    assert len(rows.read_text().splitlines()) == 4480
    (function,) = (tmp_path / "runs" / "inputs").glob("brief_*.py")
    assert function.read_text().startswith("def brief(_, responses):\n")


def of_file(prompts: list[str], responses: list[str]) -> list[float]:
    return [1.0 for _ in zip(prompts, responses, strict=True)]


def test_a_function_of_a_module_is_named() -> None:
    assert _name_function("brief", of_file) == f"{__name__}:of_file"


def made(value: float) -> Callable[..., list[float]]:
    def inner(_: list[str], responses: list[str]) -> list[float]:
        return [value] * len(responses)

    return inner


@pytest.mark.parametrize("function", [lambda _, responses: responses, made(1.0), [].append])
def test_a_function_without_a_text_of_its_own_is_refused(function: Callable[..., object]) -> None:
    with pytest.raises(ConfigError, match=r"rewards\['brief'\]: .* must be a top-level function"):
        rlhf.launch("experiment=smoke", rewards={"brief": function})


FACTOR = 3.0


def scaled(_: list[str], responses: list[str]) -> list[float]:
    return [FACTOR * len(response) for response in responses]


def test_a_function_that_uses_what_is_around_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "__module__", "__main__")
    with pytest.raises(ConfigError, match="scaled uses FACTOR from outside"):
        rlhf.launch("experiment=smoke", rewards={"scaled": scaled})


@pytest.mark.parametrize("word", ["data=local", "data.path=other.jsonl"])
def test_rows_beside_other_data_and_no_rows_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=f"{word}: the rows are given as data="):
        rlhf.launch("experiment=smoke", word, data=[{"prompt": "a"}])
    with pytest.raises(ConfigError, match="data has no rows"):
        rlhf.launch("experiment=smoke", data=[])


def test_a_function_typed_at_a_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    exec("def brief(prompts, responses): return [1.0]", names)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[__name__])
    with pytest.raises(ConfigError, match="the source code of brief is not available"):
        rlhf.launch("experiment=smoke", rewards={"brief": names["brief"]})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ppo.stepz=3"], "unknown key ppo.stepz"),
        (["experiment=smoke", "plan=only"], "plan=only and launcher.dry_run print text"),
        (["experiment=smoke", "ppo.steps=0"], "ppo.steps"),
        ([["phase=sft"]], "an override must be a text, .* put [*] before a list of overrides"),
    ],
)
def test_what_the_command_refuses_is_raised(
    words: list[Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=told):
        rlhf.launch(*words)
    assert not [*tmp_path.rglob("config.yaml")]


def test_an_unfinished_run_has_no_result(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the run has not finished"):
        _ = rlhf.Run(tmp_path).result


def test_a_report_is_shown_in_a_frame(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text('<p class="a">1 &lt; 2</p>')
    shown = Report(tmp_path / "report.html")._repr_html_()
    assert 'srcdoc="&lt;p class=&quot;a&quot;&gt;1 &amp;lt; 2&lt;/p&gt;"' in shown


def test_a_configuration_is_composed_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = rlhf.compose("experiment=smoke", "ppo.steps=7")
    assert config.ppo.steps == 7
    assert not [*tmp_path.iterdir()]
