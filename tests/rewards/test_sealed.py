"""A sealed judge keeps the code and data of the start, which nothing can change afterwards.

tests/config/bad_commands.txt has keys that seal nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.base.errors import ConfigError, RewardError
from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardTerm
from rlhf.rewards.isolated import IsolatedReward
from rlhf.rewards.rules import Answers
from rlhf.rewards.sealed import require_sealed_judges, seal_judges

MODULE = """
import ctypes
from helper import FACTOR

WANTED = [line.strip() for line in open("labels/right.txt")]

def right(prompts, responses):
    return [FACTOR * (response in WANTED) for response in responses]

def dumpable(prompts, responses):
    return [ctypes.CDLL(None).prctl(3)] * len(responses)  # PR_GET_DUMPABLE
"""
TERM = RewardTerm(
    kind=RewardKind.function,
    function="my_judge:right",
    run_code=True,
    weight=0,
    sealed="auto",
    files=["labels", "helper.py"],
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_judge.py").write_text(MODULE)
    (tmp_path / "helper.py").write_text("FACTOR = 2\n")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "right.txt").write_text("yes\n")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "copies"))
    (tmp_path / "copies").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sealed(**keys: object) -> RewardTerm:
    return seal_judges({"right": replace(TERM, **keys)})["right"]


def scores(part: IsolatedReward) -> list[float]:
    part.send_answers(Answers(["a", "b"], ["yes", "no"], [True] * 2, [1] * 2, {}))
    return [*part.receive_scores().scores]


CHANGES: dict[str, Callable[[Path], object]] = {
    "code": lambda folder: (folder / "my_judge.py").write_text(MODULE.replace("in", "not in")),
    "data": lambda folder: (folder / "labels" / "right.txt").write_text("no\n"),
    "more data": lambda folder: (folder / "labels" / "b.txt").write_text("no\n"),
    "a module that it imports": lambda folder: (folder / "helper.py").write_text("FACTOR = 9\n"),
}


def test_a_sealed_judge_keeps_its_code_and_data(folder: Path) -> None:
    part = sealed()
    judge = IsolatedReward("right", part)
    try:
        assert scores(judge) == [2, 0]
        assert not list((folder / "copies").iterdir()), "the copy is gone once it is imported"
        for change in CHANGES.values():
            change(folder)
        assert scores(judge) == [2, 0]
    finally:
        judge.close()


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_judge_is_refused_by_its_process_and_at_the_end(
    change: str, folder: Path
) -> None:
    part = sealed()
    require_sealed_judges({"right": part})
    CHANGES[change](folder)
    assert sealed().sealed != part.sealed
    with pytest.raises(ConfigError, match=rf"rewards\.right\.sealed={part.sealed}: .* changed"):
        IsolatedReward("right", part)
    with pytest.raises(RewardError, match=rf"rewards\.right\.sealed={part.sealed}: .* changed"):
        require_sealed_judges({"right": part})


@pytest.mark.usefixtures("folder")
def test_no_process_of_the_same_user_can_read_a_judges_memory() -> None:
    judge = IsolatedReward("right", sealed(function="my_judge:dumpable"))
    try:
        assert scores(judge) == [0, 0], "the system then refuses /proc/PID/mem, except to root"
    finally:
        judge.close()


@pytest.mark.usefixtures("folder")
def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.right\.sealed: .* read \(.*gone\.txt"):
        sealed(files=["gone.txt"])
