"""Generate the tables of docs/parity.md: features of peers, our keys for them, and their tests.

``python -m tools.docs.parity_page`` makes the tables from the rows in ``docs/parity.yaml``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

from tools.docs.pages import write_below

TABLE_MARK = "<!-- Made by `python -m tools.docs.parity_page` from here to the end. -->\n"
SEPARATOR = " | "
CODE = ("flag", "option", "constant")  # a first column with one of these heads is formatted as code


class ParityRow(NamedTuple):
    """One row of a table; ``tests`` are paths below tests/ with the names of test functions."""

    name: str
    what: str
    here: str
    tests: tuple[str, ...]

    @property
    def keys(self) -> list[str]:
        """Return everything in backticks, which can be typed on the command line."""
        return re.findall(r"`([^`]+)`", self.here)


class Section(NamedTuple):
    """A table with its title, the text before it, and the heads of its columns."""

    title: str
    text: str
    heads: list[str]
    rows: list[ParityRow]


def read_sections(path: Path) -> list[Section]:
    """Return the tables in ``path``, with one row per line of ``rows``.

    Raises:
        ValueError: if a row does not have four cells, or has an empty cell.
    """
    sections: object = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(sections, list)
    return [
        Section(s["title"], s["text"], s["heads"], [_row(x) for x in s["rows"].splitlines()])
        for s in sections
    ]


def _row(line: str) -> ParityRow:
    cells = [cell.strip() for cell in line.split(SEPARATOR)]
    if len(cells) != len(ParityRow._fields) or not all(cells):
        raise ValueError(f"not four cells with something in each: {line!r}")
    name, what, here, tests = cells
    return ParityRow(name, what, here, tuple(tests.split(", ")))


def parity_page(sections: list[Section]) -> str:
    """Return all tables as Markdown."""
    return "\n".join(_markdown(section) for section in sections)


def _markdown(section: Section) -> str:
    is_code = section.heads[0] in CODE
    rows = (_cells(row, is_code=is_code) for row in section.rows)
    lines = [section.heads, ["---"] * len(section.heads), *rows]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"## {section.title}\n\n{section.text.strip()}\n\n{table}"


def _cells(row: ParityRow, *, is_code: bool) -> list[str]:
    name = f"`{row.name}`" if is_code else row.name
    tests = "<br>".join(f"`tests/{test}`" for test in row.tests)
    return [cell.replace("|", "\\|") for cell in (name, row.what, row.here, tests)]


def renew_page(path: Path, rows: Path) -> None:
    """Replace the tables below the mark in ``path`` with those in ``rows``; keep the text above."""
    write_below(path, TABLE_MARK, parity_page(read_sections(rows)))


if __name__ == "__main__":
    renew_page(Path("docs/parity.md"), Path("docs/parity.yaml"))
