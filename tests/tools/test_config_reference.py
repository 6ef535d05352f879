"""docs/configuration.md has every key of the schema, with what the schema and conf/ say of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from rlhf.config.hydra_errors import schema_types
from rlhf.config.schema.data import DatasetConfig
from rlhf.config.schema.rewards import RewardTerm
from rlhf.config.schema.run import RunConfig
from tools.docs.conf_comments import explanation
from tools.docs.config_reference import TABLE_MARK, reference, renew_page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration.md"
REFERENCE = reference(ROOT / "conf")
ROWS = {row[1]: row[0] for row in re.finditer(r"^\| `([\w.]+)` \|.*$", REFERENCE, re.MULTILINE)}


def test_page_is_up_to_date() -> None:
    _, mark, tables = PAGE.read_text().partition(TABLE_MARK)
    assert mark
    assert tables == "\n" + REFERENCE, "run python -m tools.docs.config_reference"


def test_every_key_has_one_row() -> None:
    groups = {name for name, kind in get_type_hints(RunConfig).items() if is_dataclass(kind)}
    of_sets = {f"data.sets.NAME.{each.name}" for each in fields(DatasetConfig)}
    of_parts = {f"rewards.NAME.{each.name}" for each in fields(RewardTerm)}
    assert ROWS.keys() == schema_types().keys() - groups | of_sets | of_parts
    assert REFERENCE.count("\n| `") == len(ROWS)


def test_every_key_is_explained() -> None:
    assert not [row for row in ROWS.values() if row.endswith("|  |")]


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("ppo.gamma", "a number | `1` | above 0 and at most 1 | ppo | fixed | Discount per token."),
        (
            "seed",
            "a whole number | `1` | 0 or more | every phase | fixed | Seed of every random stream.",
        ),
        (
            "data.split",
            "a list, each item a number | `[7,28,2]` |  | "
            "every phase | fixed | Proportions of SFT, reward",
        ),
        (
            "hardware.device",
            "one of cpu, cuda | `cpu` |  | every phase | fixed | cpu or cuda (GPUs).",
        ),
        (
            "sft.lr",
            "a number | `model.learning_rates.sft` | above 0 | sft | fixed | Peak learning rate.",
        ),
        (
            "ppo.cliprange_value",
            "a number or null | `null` | above 0 | ppo | fixed | Values are clipped to",
        ),
        (
            "model.init",
            "one of pretrained, random, sft, gold | `random` |  | "
            "every phase | fixed | pretrained: load",
        ),
        (
            "run_dir",
            "text or null | `null` |  | "
            "nothing | fixed | Directory of this run; null: runs/&lt;name&gt;",
        ),
        (
            "checkpoint.most_skipped",
            "a whole number or null | `20` | above 0 | nothing | free | Steps in a row",
        ),
        (
            "rewards.NAME.columns",
            "a list, each item text | `[]` |  | ppo | fixed | Columns of the data",
        ),
        (
            "data.sets.NAME.path",
            "text | `???` |  | every phase | fixed | File, folder or hub id of the dataset.",
        ),
    ],
)
def test_row_by_hand(key: str, row: str) -> None:
    assert ROWS[key].startswith(f"| `{key}` | {row}")


def test_names_of_pages_and_addresses_are_links() -> None:
    assert "([algorithms.md](algorithms.md))" in ROWS["ppo.advantage_estimator"]
    assert "(<http://joschu.net/blog/kl-approx.html>)" in ROWS["ppo.kl_estimator"]


def test_number_without_a_docstring_has_no_explanation() -> None:
    @dataclass
    class Bare:
        size: int

    assert not explanation(Bare, "size")


def test_renewing_keeps_what_stands_above(tmp_path: Path) -> None:
    page = tmp_path / "configuration.md"
    page.write_text("Hello\n" + TABLE_MARK + "old")
    renew_page(page, ROOT / "conf")
    assert page.read_text() == "Hello\n" + TABLE_MARK + "\n" + REFERENCE
