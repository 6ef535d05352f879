"""Add numbers such as margins, which a loss reads, to pairs; read held-out pairs by group."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlhf.base.errors import DataError
from rlhf.config.choices import Source
from rlhf.config.schema.data import DatasetConfig
from rlhf.data.detect import convert_rows
from rlhf.data.records import Record
from rlhf.data.tables import find_tables, rows_of
from rlhf.options import RewardConfig

if TYPE_CHECKING:
    from datasets import Dataset

GROUP = "group"  # name of the column with a pair's group in the file of reward.groups_path
# Names of the columns with numbers that ``add_pair_numbers`` adds to tokenised pairs.
MARGIN, CHOSEN_SCORE, REJECTED_SCORE = "margin", "chosen_score", "rejected_score"


def add_pair_numbers(examples: Dataset, records: Sequence[Record], config: RewardConfig) -> Dataset:
    """Return tokenised pairs with the margins or scores that the loss of ``config`` reads.

    Raises:
        DataError: if a value is not a finite number.
    """
    chosen, rejected = config.score_columns or (None, None)
    for name, key, column in (
        (MARGIN, "reward.margin_column", config.margin_column),
        (CHOSEN_SCORE, "reward.score_columns", chosen),
        (REJECTED_SCORE, "reward.score_columns", rejected),
    ):
        if column is not None:
            values = [_read_number(records[row], column, key=key) for row in examples["row"]]
            examples = examples.add_column(name, values)
    return examples


def _read_number(record: Record, column: str, *, key: str) -> float:
    value = (record.columns or {}).get(column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            f"{key}: the column '{column}' holds {value!r} in the pair with the prompt "
            f"{(record.prompt or '')[-60:]!r}; must be a finite number in every pair."
        )
    return float(value)


def read_pair_groups(path: str | None) -> Mapping[str, list[Record]]:
    """Return the pairs of each group in the file ``path``, the value of reward.groups_path.

    Raises:
        DataError: if the file cannot be read, or a row has no group or no pair of responses.
    """
    if path is None:
        return {}
    tables = find_tables(DatasetConfig(path=path), Source.local, key="reward.groups_path")
    groups: defaultdict[str, list[Record]] = defaultdict(list)
    for table in (*tables.train, *tables.eval):
        keep = {GROUP: "reward.groups_path"}
        converted = convert_rows(rows_of(table), source=table.place, keep=keep)
        for record in converted.records:
            if record.rejected is None or not record.columns:
                raise DataError(
                    f"{table.place}: reward.groups_path needs pairs with the columns prompt, "
                    f"chosen, rejected and {GROUP}."
                )
            groups[str(record.columns[GROUP])].append(record)
    return groups
