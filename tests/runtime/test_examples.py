"""Every file in examples/ works, on the models of a finished run where it needs them."""

import json
from pathlib import Path

import pytest

from tests.runs import ROOT, python

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
SAID = {
    "plain_ppo_loop": ["step 0: score", "step 1: score", "Name a fruit. ->"],
    "custom_data_set": ["step 1: 16 prompts, such as 'Human: Where is parcel"],
    "graded_responses": ["9,000 responses with scores, and 500 pairs"],
    "custom_estimator": ["their advantages: tensor", "actor loss:"],
}
ELSEWHERE = {"my_rewards": "test_rewards", "arithmetic": "test_docs", "tutorial_data": "below"}
ELSEWHERE |= {"environments": "test_environment_run", "sentiment": "test_sentiment_example"}


@pytest.fixture(scope="module")
def folder(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/latest."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "runs").mkdir()
    (folder / "runs" / "latest").symlink_to(tiny_run)
    return folder


@pytest.mark.parametrize("name", SAID)
def test_example_works(name: str, folder: Path) -> None:
    run = python(EXAMPLES / f"{name}.py", cwd=folder)
    assert run.returncode == 0, run.stderr
    for text in SAID[name]:
        assert text in run.stdout


def test_every_example_is_executed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SAID.keys() | ELSEWHERE.keys()


def test_data_of_the_tutorial(tmp_path: Path) -> None:
    assert python(EXAMPLES / "tutorial_data.py", cwd=tmp_path).returncode == 0
    known = {"answers": "prompt response", "pairs": "prompt chosen rejected answer"}
    for (name, columns), size in zip(known.items(), (1120, 4480), strict=True):
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert len(lines) == size
        assert set(json.loads(lines[0])) == set(columns.split())
