"""Every file in examples/ works, on the models of a finished run where it needs them."""

import json
import re
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
ELSEWHERE |= {
    "ppo_in_one_file": "below",
    "environments": "test_environment_run",
    "sentiment": "test_sentiment_example",
}


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


def run_in_one_file(folder: Path, *changes: str) -> list[float]:
    """Run the example with other constants; return the score of each step that it prints."""
    code = (EXAMPLES / "ppo_in_one_file.py").read_text()
    for change in changes:
        name = change.partition(" = ")[0]
        code, count = re.subn(f"^{name} = .*", change, code, flags=re.MULTILINE)
        assert count == 1
    (folder / "changed.py").write_text(code)
    run = python(folder / "changed.py", cwd=folder, PYTHONPATH=ROOT)
    assert run.returncode == 0, run.stderr
    return [float(score) for score in re.findall(r"^step .*: score ([\d.]+), KL", run.stdout, re.M)]


def test_ppo_in_one_file_takes_its_steps(tmp_path: Path) -> None:
    sizes = "BATCH, SFT_STEPS, PPO_STEPS, PPO_EPOCHS, MINI_BATCHES"
    assert len(run_in_one_file(tmp_path, f"{sizes} = 16, 2, 5, 2, 2")) == 2


@pytest.mark.soak
def test_ppo_in_one_file_learns(tmp_path: Path) -> None:
    scores = run_in_one_file(tmp_path)
    assert scores[0] < 0.7
    assert scores[-1] > 0.88
