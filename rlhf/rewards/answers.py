"""The responses to score, and the functions that score them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Answers(NamedTuple):
    """A batch of responses; row i of every field belongs to response i."""

    prompts: Sequence[str]
    responses: Sequence[str]
    ended: Sequence[bool]  # by itself
    tokens: Sequence[int]  # numbers of response tokens, the end token included
    columns: Mapping[str, Sequence[Any]]  # the dataset columns that the part reads, by name


ScoreFunction = Callable[[Answers], Sequence[float]]
