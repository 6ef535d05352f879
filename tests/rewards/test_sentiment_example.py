"""The rewards and prompts of examples/sentiment.py, with small lexicons like the packages."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rlhf.base.errors import ConfigError
from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardTerm
from rlhf.rewards.isolated import IsolatedReward

ROOT = Path(__file__).parents[2]
LEXICON = "VALUES = {'good': 3, 'lovely': 3, 'bad': -3}\n"
SCORE = "sum(VALUES.get(word.strip('.,!'), 0) for word in text.lower().split())"
AFINN = f"""{LEXICON}
class Afinn:
    def score(self, text):
        return float({SCORE})
"""
VADER = f"""{LEXICON}
class SentimentIntensityAnalyzer:
    def polarity_scores(self, text):
        return {{"compound": {SCORE} / 10}}
"""


@pytest.fixture
def lexicons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with packages of the lexicons' names, where Python looks first."""
    (tmp_path / "vaderSentiment").mkdir()
    (tmp_path / "vaderSentiment" / "__init__.py").touch()  # or an installed one comes first
    (tmp_path / "vaderSentiment" / "vaderSentiment.py").write_text(VADER)
    (tmp_path / "afinn.py").write_text(AFINN)
    for folder in (ROOT / "examples", tmp_path):
        monkeypatch.syspath_prepend(folder)
    for name in ("sentiment", "afinn", "vaderSentiment", "vaderSentiment.vaderSentiment"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.fixture
def sentiment(lexicons: Path) -> ModuleType:
    return importlib.import_module("sentiment")


def test_repetition_raises_the_reward_and_not_the_judge(sentiment: ModuleType) -> None:
    responses = [" was good.", " was good, good, good.", " was the best of the good.", ""]
    prompts = ["The hike"] * len(responses)
    assert sentiment.vader(prompts, responses) == pytest.approx([0.3, 0.9, 0.3, 0])
    assert sentiment.afinn(prompts, responses) == pytest.approx([1.5, 1.5, 3 / 5, 0])
    assert sentiment.distinct(prompts, responses) == pytest.approx([1, 1 / 3, 1, 1])


def test_held_out_prompts_are_about_other_things(sentiment: ModuleType, tmp_path: Path) -> None:
    words = {}
    for name, subjects in {"train": sentiment.SUBJECTS, "eval": sentiment.HELD_OUT}.items():
        sentiment.write_prompts(tmp_path / name, subjects)
        rows = [json.loads(line)["prompt"] for line in (tmp_path / name).read_text().splitlines()]
        assert len(rows) == len(set(rows)) == len(subjects) * len(sentiment.BEGINNINGS)
        words[name] = {word.strip(",:") for row in rows for word in row.split()}
    assert len(rows) >= 150
    assert not words["train"] & set(sentiment.HELD_OUT)
    assert not words["eval"] & set(sentiment.SUBJECTS)


def test_a_missing_lexicon_is_named_with_its_extra(
    lexicons: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lexicons / "afinn.py").write_text("raise ModuleNotFoundError(name='afinn')")
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, (ROOT, lexicons, ROOT / "examples"))))
    part = RewardTerm(kind=RewardKind.function, function="sentiment:vader", run_code=True)
    with pytest.raises(ConfigError, match=r"afinn is missing: pip install -e '\.\[sentiment\]'"):
        IsolatedReward("vader", part)
