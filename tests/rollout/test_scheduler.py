"""Continuous batching, on a decoder that is a table: what it is asked, and what comes out."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from rlhf.models.tokenizers import train_tokenizer
from rlhf.rollout import scheduler
from rlhf.rollout.decoders.decoder import KvCache, Texts
from rlhf.rollout.sampling import SamplingSettings, StopTexts
from rlhf.rollout.scheduler import Request, Scheduler

VOCABULARY, END = 50, 49
TOKENIZER = train_tokenizer(["words"], vocab_size=260)


class TableDecoder(KvCache):
    """A row's next token follows from the sum of all its tokens; logits say it with certainty."""

    rows_are_exact = extends_together = True

    def __init__(self, rows: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.prefills: list[list[int]] = []  # lengths of the prompts taken at once
        self.decoded: list[int] = []  # rows of each decode

    def prefill(self, texts: Texts, *, first_row: int) -> Tensor:
        ids_BP, lengths, starts = texts
        self.prefills.append(lengths)
        for row, (ids_P, length) in enumerate(zip(ids_BP.tolist(), lengths, strict=True)):
            held = [] if starts is None else self.rows[first_row + row]
            assert starts is None or starts[row] == len(held), "a row is extended at a wrong place"
            self.rows[first_row + row] = held + ids_P[:length]
        return self._logits(self.rows[first_row : first_row + len(lengths)])

    def decode(self, ids_B: Tensor, positions: list[int]) -> Tensor:
        self.decoded.append(len(positions))
        used = self.rows[: len(positions)]
        for row, token, position in zip(used, ids_B.tolist(), positions, strict=True):
            assert position in (len(row), 0), "a row is decoded at the wrong position"
            row.append(token)
        return self._logits(used)

    def copy_row(self, source: int, target: int, *, columns: int) -> None:
        assert columns == len(self.rows[source]), "not all that the row remembers is copied"
        self.rows[target] = list(self.rows[source])

    def move_row(self, source: int, target: int, *, columns: int) -> None:
        self.copy_row(source, target, columns=columns)
        self.rows[source] = [-1]  # nobody may read it

    def _logits(self, rows: list[list[int]]) -> Tensor:
        logits_BV = torch.full((len(rows), VOCABULARY), -50.0)
        for row, tokens in enumerate(rows):
            logits_BV[row, next_token(tokens)] = 50.0
        return logits_BV


class PackingTable(TableDecoder):
    """Takes prompts beside the newest tokens."""

    def decode_and_prefill(self, ids_B: Tensor, positions: list[int], texts: Texts) -> Tensor:
        logits_BV = self.decode(ids_B, positions)
        prefilled_NV = self.prefill(texts, first_row=len(positions))
        return torch.cat([logits_BV, prefilled_NV])


class SingleTable(TableDecoder):
    """Extends one row at a time, and rounds differently beside other rows."""

    rows_are_exact = extends_together = False


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) * 7 + len(tokens)) % VOCABULARY


def expected(prompt: tuple[int, ...], limit: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + limit and (len(tokens) == len(prompt) or tokens[-1] != END):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def run(
    prompts: list[tuple[int, ...]],
    *,
    max_rows: int,
    limits: list[int] | None = None,
    min_tokens: int = 0,
    max_tokens: int = 12,
    table: type[TableDecoder] = TableDecoder,
    any_rank_works: Callable[[bool], bool] = bool,
) -> tuple[list[Request], TableDecoder]:
    limits = limits or [12] * len(prompts)
    requests = [Request(i, p, n) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))]
    sampling = SamplingSettings(
        max_tokens=max_tokens, temperature=1.0, top_k=1, top_p=1.0, min_tokens=min_tokens
    )
    decoder = table(max_rows)
    Scheduler(
        decoder,
        sampling,
        end_ids=[END],
        stop=StopTexts(TOKENIZER, []),
        max_rows=max_rows,
        any_rank_works=any_rank_works,
    ).run(requests, torch.rand(len(prompts), 12))
    return requests, decoder


PROMPTS = [tuple(range(i, i + 1 + i % 5)) for i in range(23)]


@pytest.mark.parametrize("table", [TableDecoder, PackingTable])
@pytest.mark.parametrize("max_rows", [1, 2, 5, 8, 23])
def test_every_request_gets_its_own_tokens(max_rows: int, table: type[TableDecoder]) -> None:
    requests, decoder = run(PROMPTS, max_rows=max_rows, table=table)
    assert [r.ids for r in requests] == [expected(p, 12) for p in PROMPTS]
    assert [r.has_ended for r in requests] == [expected(p, 12)[-1] == END for p in PROMPTS]
    assert {len(r.ids) for r in requests} > {12}, "some end early, some never"
    assert max(decoder.decoded) <= max_rows
    assert all(len(r.logprobs) == len(r.ids) for r in requests)


def test_rows_that_ended_cost_nothing() -> None:
    limits = [1, 3, 12, 2]
    requests, decoder = run([(1,), (2,), (3,), (4,)], max_rows=4, limits=limits)
    # The first token comes with the prompt; each decode runs the rows that still want one.
    wanted = [sum(len(r.ids) > step for r in requests) for step in range(1, 12)]
    assert decoder.decoded == [count for count in wanted if count]


def test_prompts_join_a_step_of_the_others() -> None:
    """A place that is free is taken at once; only the first prompts have a pass of their own."""
    limits = [2 if i % 2 else 10 for i in range(16)]
    prompts = [(i + 1, 5) for i in range(16)]
    requests, decoder = run(prompts, max_rows=4, limits=limits, table=PackingTable)
    assert decoder.prefills[0] == [2] * 4
    assert len(decoder.decoded) < 1.25 * sum(len(r.ids) for r in requests) / 4
    assert [r.ids for r in requests] == list(map(expected, prompts, limits))


class PagedTable(TableDecoder):
    """It has room for 12 tokens, in pages of 2."""

    def has_room(self, lengths: Sequence[int]) -> bool:
        return sum(-(-length // 2) for length in lengths) <= 6


@pytest.mark.parametrize("spare", [1, 4, 256])
def test_rows_join_and_give_way_as_the_cache_has_room(
    spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortest row gives way, and continues later with the numbers that it had left."""
    monkeypatch.setattr(scheduler, "SPARE_TOKENS", spare)
    prompts = [(n, n) for n in range(3, 15)]
    requests, decoder = run(prompts, max_rows=8, limits=[9] * 12, table=PagedTable)
    assert [r.ids for r in requests] == [expected(p, 9) for p in prompts]
    prefilled = [length for lengths in decoder.prefills for length in lengths]
    assert (len(prefilled) > len(prompts)) == (spare < 256)
    assert max(decoder.decoded) == {1: 3, 4: 2, 256: 1}[spare]


def test_long_responses_wait_for_fewer_free_rows() -> None:
    """After the first rows have ended, 1/16 of 64 rows is enough for a prefill, not 1/8."""
    counts = []
    for max_tokens in (12, 512):
        limits = [2 if i % 16 == 0 else 11 for i in range(64)] + [11] * 8
        prompts = [(3, 1)] * 72  # none of them ends before its limit
        _, decoder = run(prompts, max_rows=64, limits=limits, max_tokens=max_tokens)
        counts.append(len(decoder.prefills))
    assert counts == [2, 3]


def test_prompts_of_like_length_are_taken_together() -> None:
    _, decoder = run(PROMPTS, max_rows=6)
    longest = [length for lengths in decoder.prefills for length in lengths]
    assert longest == sorted(longest, reverse=True)


@pytest.mark.parametrize("table", [TableDecoder, PackingTable])
def test_equal_prompts_that_join_late_share_a_prefill(table: type[TableDecoder]) -> None:
    prompts, limits = [(9, 9, 9), (8, 8, 8), (7, 7, 7), (3, 4), (3, 4)], [9, 2, 2, 9, 9]
    requests, decoder = run(prompts, max_rows=3, limits=limits, table=table)
    assert decoder.prefills == [[3, 3, 3], [2]]
    assert [r.ids for r in requests] == list(map(expected, prompts, limits))


def test_a_prefill_counts_distinct_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 responses to each of 8 prompts of 16 tokens, at most 64 prompt tokens per prefill."""
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", 64)
    prompts = [(n,) * 16 for n in range(1, 9) for _ in range(8)]
    requests, decoder = run(prompts, max_rows=64)
    assert decoder.prefills == [[16] * 4] * 2
    assert [r.ids for r in requests] == [expected(p, 12) for p in prompts]


def test_the_end_token_is_barred_until_enough_tokens_are_there() -> None:
    ends_at_once = next(
        p for p in ((a, b) for a in range(50) for b in range(9)) if next_token(list(p)) == END
    )
    (free,), _ = run([ends_at_once], max_rows=1)
    (barred,), _ = run([ends_at_once], max_rows=1, min_tokens=3)
    assert free.ids == [END]
    assert END not in barred.ids[:3]


def test_a_rank_that_has_finished_goes_on_while_others_work() -> None:
    """As many forward passes on every rank as the busiest one needs."""
    asked: list[bool] = []

    def any_rank_works(here: bool) -> bool:
        asked.append(here)
        return len(asked) <= 7

    _, decoder = run([(1, 2)], max_rows=1, limits=[3], any_rank_works=any_rank_works)
    assert len(decoder.prefills) + len(decoder.decoded) == 7
    assert asked == [True] * 3 + [False] * 5
