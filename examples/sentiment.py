"""Write beginnings of opinions, and score how a model ends them: ``python examples/sentiment.py``.

The folder ``sentiment`` gets ``train.jsonl`` and ``eval.jsonl``, which share no subject: held-out
prompts are about things that training never mentions. ``experiment=smollm2_sentiment`` learns from
``vader``; ``afinn`` and ``distinct`` are judges, which it does not learn from. Different people
have rated the words of the two lexicons.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

try:
    from afinn import Afinn
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
except ImportError as error:
    raise ImportError(f"{error.name} is missing: pip install -e '.[sentiment]'") from error

BEGINNINGS = (
    "The {} was",
    "I thought the {} was",
    "In the end, the {}",
    "To be honest, the {}",
    "My neighbour told me that the {}",
    "What I remember of the {} is",
    "After an hour, the {}",
    "We had read about the {}, but it",
    "Everybody talks about the {}, and I",
    "It was raining, and the {}",
    "When the {} was over, we",
    "They changed the {}, which",
    "My sister went to the {} and",
    "Compared with last year, the {}",
    "If you ask me, the {}",
    "This is what I think of the {}: it",
)
SUBJECTS = (
    "film hotel concert restaurant flight lecture museum party play exhibition journey breakfast "
    "wedding novel match festival campsite speech bakery course musical ferry circus meeting "
    "market garden cruise parade fair seminar"
).split()
HELD_OUT = (
    "ballet dinner documentary holiday cafe tour opera comedy hike picnic debate show".split()
)
LONG = 4  # letters of a word that a sentence does not need twice
VADER, AFINN = SentimentIntensityAnalyzer(), Afinn()


def vader(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:  # noqa: ARG001 - unread
    """Return VADER's compound score of each response, from -1 (negative) to 1 (positive)."""
    return [VADER.polarity_scores(response)["compound"] for response in responses]


def afinn(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:  # noqa: ARG001 - unread
    """Return the mean of AFINN's values, -5 to 5, over the distinct words of each response.

    A longer response and a repeated word gain nothing.
    """
    words = [list(dict.fromkeys(_words(response))) for response in responses]
    return [AFINN.score(" ".join(each)) / max(1, len(each)) for each in words]


def distinct(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:  # noqa: ARG001 - unread
    """Return the share of distinct words among those of four letters or more; 1 without any.

    Shorter words, such as "the", are repeated by every long sentence.
    """
    words = [[word for word in _words(each) if len(word) >= LONG] for each in responses]
    return [len(set(each)) / len(each) if each else 1.0 for each in words]


def _words(text: str) -> list[str]:
    return re.findall(r"[\w'-]+", text.lower())


def write_prompts(path: Path, subjects: Sequence[str]) -> None:
    """Write one row for each beginning and subject, in random order."""
    prompts = [begin.format(subject) for begin, subject in product(BEGINNINGS, subjects)]
    random.Random(1).shuffle(prompts)
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(lines)} prompts")


if __name__ == "__main__":
    folder = Path("sentiment")
    folder.mkdir(exist_ok=True)
    write_prompts(folder / "train.jsonl", SUBJECTS)
    write_prompts(folder / "eval.jsonl", HELD_OUT)
