"""Let the reward model of a run choose among several responses to each prompt.

The file has the columns of RewardBench 2 (https://arxiv.org/abs/2506.01937), one JSON object per
line: ``prompt``, ``chosen`` (all good responses), ``rejected``; optionally ``subset`` and ``id``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from rlhf.algorithms.reward import end_scores
from rlhf.base.errors import DataError
from rlhf.base.foreign_errors import describe_fault, translate_errors
from rlhf.base.types import ValueModel
from rlhf.base.user_paths import read_user_text
from rlhf.data.collate import collate_sequences
from rlhf.data.encoding import Encoder
from rlhf.data.records import Record
from rlhf.evaluate.figures import RankedRow
from rlhf.phases.shared.context import RunContext


class ResponsesRow(BaseModel):
    """A prompt with good and bad responses; other columns are ignored."""

    prompt: str = Field(min_length=1)
    chosen: list[str] = Field(min_length=1)
    rejected: list[str] = Field(min_length=1)
    subset: str = "all"
    id: str = ""


def read_responses(file: Path) -> list[ResponsesRow]:
    """Read the rows of a file; raise a DataError that names the row, the column and the rule."""

    def error(row: int, reason: str) -> DataError:
        return DataError(f"--best-of {file}: row {row}: {reason}")

    with translate_errors(partial(error, 1)):
        lines = read_user_text(file).split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(ResponsesRow.model_validate_json(line))
            except ValidationError as fault:
                raise error(number, describe_fault(fault)) from fault
    if not rows:
        raise error(1, "is missing; each row is an object with prompt, chosen and rejected")
    return rows


def score_rows(
    context: RunContext, model: ValueModel, rows: Sequence[ResponsesRow], *, micro: int
) -> Iterator[RankedRow]:
    """Yield for each row the scores of its good and of its bad responses."""
    encoder = Encoder(context.tokenizer, context.config.data.template)
    device, pad_id = context.ranks.device, int(context.tokenizer.pad_token_id)
    for row in rows:
        texts, scores = [*row.chosen, *row.rejected], list[float]()
        pieces = [[encoder.render_response(Record(row.prompt), text)] for text in texts]
        encoded = [piece for (piece,) in encoder.encode_pieces(pieces)]
        for start in range(0, len(texts), micro):
            context.heartbeat.beat()
            chunk = encoded[start : start + micro]
            ids, lengths = [prompt + text for prompt, text in chunk], [len(p) for p, _ in chunk]
            batch = collate_sequences(ids, lengths, pad_id=pad_id, device=device)
            with model.evaluating():
                scores += end_scores(model(batch.ids_BS), batch.attend_BS).tolist()
        num_good = len(row.chosen)
        yield RankedRow(row.subset, row.id, scores[:num_good], scores[num_good:])
