"""Episodes in the scheduler: turns, parked rows and observations, on a decoder that is a table."""

from functools import partial
from random import Random

import pytest
import torch

from rlhf.options.environments.parked_rows import Continuation, ParkedRows
from rlhf.rollout.sampling import SamplingSettings, StopTexts
from rlhf.rollout.scheduler import Request, Scheduler
from tests.rollout.test_scheduler import (
    END,
    PROMPTS,
    TOKENIZER,
    PackingTable,
    SingleTable,
    TableDecoder,
    expected,
)

TURN, MOST = 6, 40  # tokens of a turn, and of an episode after its prompt


def turns_of(prompt: tuple[int, ...]) -> int:
    return 1 + sum(prompt) % 4


def observation(index: int, turn: int) -> list[int]:
    return [(index + turn + k) % 40 for k in range(1 + (index * turn) % 3)]


def episode(index: int) -> tuple[list[int], list[int], list[int]]:
    """All tokens of an episode, and where its turns begin and end."""
    ids, starts, ends = [], [], []
    for turn in range(1, turns_of(PROMPTS[index]) + 1):
        starts.append(len(ids))
        ids += expected((*PROMPTS[index], *ids), min(TURN, MOST - len(ids)))
        ends.append(len(ids))
        if turn < turns_of(PROMPTS[index]):
            ids += observation(index, turn)
    return ids, starts, ends


class Table:
    """A ``Counterpart`` that answers late, in any order, and sometimes not at all."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.due: list[Request] = []
        self.turns: dict[int, int] = {}
        self.waits = 0

    def submit_turn(self, request: Request) -> None:
        assert request not in self.due, "a turn ended twice"
        self.due.append(request)

    def continuations(self, *, wait: bool) -> list[Continuation]:
        self.waits += wait
        count = self.random.randint(int(wait), max(1, len(self.due))) if self.due else 0
        self.random.shuffle(self.due)
        found, self.due = self.due[:count], self.due[count:]
        return [self.answer(request) for request in found]

    def answer(self, request: Request) -> Continuation:
        index = request.index
        turn = self.turns[index] = self.turns.get(index, 0) + 1
        if turn == turns_of(request.prompt):
            return Continuation(index, None)
        added = observation(index, turn)
        begin = len(request.ids) + len(added)
        return Continuation(index, added, limit=min(begin + TURN, MOST), first_draw=turn * TURN)


def run(table: type[TableDecoder], counterpart: Table, *, max_rows: int) -> list[Request]:
    requests = [Request(i, prompt, TURN) for i, prompt in enumerate(PROMPTS)]
    sampling = SamplingSettings(max_tokens=TURN, temperature=1.0, top_k=1, top_p=1.0)
    Scheduler(
        table(2 * max_rows),
        sampling,
        end_ids=[END],
        stop=StopTexts(TOKENIZER, []),
        max_rows=max_rows,
        any_rank_works=bool,
        pause=partial(ParkedRows, counterpart),
    ).run(requests, torch.rand(len(PROMPTS), 4 * TURN))
    return requests


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("max_rows", [1, 4, 23])
@pytest.mark.parametrize("table", [TableDecoder, PackingTable, SingleTable])
def test_every_episode_has_its_own_turns(
    table: type[TableDecoder], max_rows: int, seed: int
) -> None:
    for request in run(table, Table(seed), max_rows=max_rows):
        ids, starts, ends = episode(request.index)
        assert request.ids == ids
        assert (request.turn_starts, request.turn_ends) == (starts, ends)
        assert len(request.logprobs) == len(ids)


def test_a_late_answer_stops_nobody_whose_rows_are_exact() -> None:
    late, together = Table(0), Table(0)
    run(PackingTable, late, max_rows=23)
    run(SingleTable, together, max_rows=23)
    assert late.waits < together.waits
