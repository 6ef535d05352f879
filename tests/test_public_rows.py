"""Rows of public bug reports and of random columns: used right, or refused by name.

Cases and values are invented; the numbers name cases of a list of 69. What a refusal proposes is
read back as it is printed.
"""

import json
import random
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from rlhf.base.errors import DataError
from rlhf.config.schema.data import DatasetConfig
from rlhf.data.reading import describe_dataset
from rlhf.data.records import RawDataset, Record
from tests.data.row_tables import Rows, load, write

ROWS = 36
Value = Callable[[int], Any]
Columns = dict[str, Value]


def make(**columns: Any) -> Rows:
    """Return rows of columns, each a constant or a function of the row's number."""
    return [{n: v(i) if callable(v) else v for n, v in columns.items()} for i in range(ROWS)]


def ask(i: int) -> str:
    return f"What is the number {i} good for?"


def good(i: int) -> str:
    return f"It counts {i} apples, a right answer."


def bad(i: int) -> str:
    return f"No idea of {i}, a wrong answer."


def side(i: int) -> bool:
    """The first of two responses is the good one."""
    return i % 3 != 1


def first(i: int) -> str:
    return good(i) if side(i) else bad(i)


def second(i: int) -> str:
    return bad(i) if side(i) else good(i)


def talk(i: int, answer: Value = good) -> Rows:
    return [{"role": "user", "content": ask(i)}, {"role": "assistant", "content": answer(i)}]


def quote(*items: dict[str, Any]) -> str:
    """Return a list as numpy prints it: without commas."""
    return "[" + "\n ".join(map(str, items)) + "]"


def chat(i: int, **more: Any) -> Rows:
    return [talk(i)[0], talk(i, first)[1] | more]


PAIR, ONE = {"response_a": first, "response_b": second}, {"prompt": ask, "response": first}
AB, NOT_TIED = "model_a model_b".split(), range(ROWS)
LIST = {"prompt": ask, "responses": lambda i: ["so so, really", good(i), bad(i)]}
LINES: dict[str, dict[str, Any]] = {
    # P2, P3, P4, P6, P8: what nothing reads
    **{
        f"P2 {name}": {**LIST, name: values}
        for names, values in (
            (["ranks", "ranking", "rank", "human_rank"], [2, 1, 3]),
            (["ratings", "score", "rewards", "judge_scores", "grade"], [3.5, 9, 1]),
        )
        for name in names
    },
    "P4 JSON": {"messages": lambda i: json.dumps(talk(i))},
    "P4 Python": {"messages": lambda i: str(talk(i))},
    "P4 numpy": {"messages": lambda i: quote(*talk(i))},
    "P4 pair": {"chosen": lambda i: str(talk(i)), "rejected": lambda i: json.dumps(talk(i, bad))},
    "P4 beside a prompt": {
        "prompt": ask,
        "chosen": lambda i: json.dumps(talk(i)),
        "rejected": lambda i: json.dumps(talk(i, bad)),
    },
    "P4 ShareGPT": {
        "conversations": lambda i: json.dumps(
            [{"from": "human", "value": ask(i)}, {"from": "gpt", "value": good(i)}]
        )
    },
    "P13 integers": {"prompt": ask, "completion": first, "label": lambda i: int(side(i))},
    "P13 -1": {"prompt": ask, "completion": first, "label": lambda i: 1 if side(i) else -1},
}
