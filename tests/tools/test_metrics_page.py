"""The page of metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs.metrics_page import TABLE_MARK, markdown_table, renew_page

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_up_to_date() -> None:
    _, mark, table = PAGE.read_text(encoding="utf-8").partition(TABLE_MARK)
    assert mark
    assert table == "\n" + markdown_table(), "run: python -m tools.docs.metrics_page"


def test_a_bar_in_a_cell_does_not_end_it() -> None:
    rows = [line for line in markdown_table().splitlines() if line.startswith("|")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {7}


def test_renewing_keeps_what_stands_above(tmp_path: Path) -> None:
    page = tmp_path / "metrics.md"
    page.write_text("Hello\n" + TABLE_MARK + "old")
    renew_page(page)
    assert page.read_text() == "Hello\n" + TABLE_MARK + "\n" + markdown_table()


def test_a_page_without_the_mark_is_not_touched(tmp_path: Path) -> None:
    page = tmp_path / "metrics.md"
    page.write_text("Hello\n")
    with pytest.raises(ValueError, match="has no line"):
        renew_page(page)
    assert page.read_text() == "Hello\n"
