"""The page of what peers offer, what does it here, and which test shows it.

``python -m rlhf.config.parity`` renews ``docs/parity.md`` from the rows in ``docs/parity.yaml``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

from rlhf.config.pages import write_below

TABLE_MARK = "<!-- Made by `python -m rlhf.config.parity` from here to the end. -->\n"
SEPARATOR = " | "
CODE = ("flag", "option", "constant")  # heads of first columns that are written as code


class Row(NamedTuple):
    """One line of a table; ``tests`` are paths below tests/ with the name of a function."""

    name: str
    what: str
    here: str
    tests: tuple[str, ...]

    @property
    def keys(self) -> list[str]:
        """What can be typed: all that stands in backticks."""
        return re.findall(r"`([^`]+)`", self.here)


class Section(NamedTuple):
    """A table under a title, with the heads of its columns and a word before it."""

    title: str
    text: str
    heads: list[str]
    rows: list[Row]


def read_sections(path: Path) -> list[Section]:
    """The tables of ``path``, a row for each line of ``rows``.

    Raises:
        ValueError: a row has not four cells, or an empty one.
    """
    sections: object = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(sections, list)
    return [
        Section(s["title"], s["text"], s["heads"], [_row(x) for x in s["rows"].splitlines()])
        for s in sections
    ]


def _row(line: str) -> Row:
    cells = [cell.strip() for cell in line.split(SEPARATOR)]
    if len(cells) != len(Row._fields) or not all(cells):
        raise ValueError(f"not four cells with something in each: {line!r}")
    name, what, here, tests = cells
    return Row(name, what, here, tuple(tests.split(", ")))


def parity_page(sections: list[Section]) -> str:
    """All tables as Markdown."""
    return "\n".join(_markdown(section) for section in sections)


def _markdown(section: Section) -> str:
    is_code = section.heads[0] in CODE
    rows = (_cells(row, is_code=is_code) for row in section.rows)
    lines = [section.heads, ["---"] * len(section.heads), *rows]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"## {section.title}\n\n{section.text.strip()}\n\n{table}"


def _cells(row: Row, *, is_code: bool) -> list[str]:
    name = f"`{row.name}`" if is_code else row.name
    tests = "<br>".join(f"`tests/{test}`" for test in row.tests)
    return [cell.replace("|", "\\|") for cell in (name, row.what, row.here, tests)]


def renew_page(path: Path, rows: Path) -> None:
    """Write the tables of ``rows`` into ``path``, below its mark; what stands above is kept."""
    write_below(path, TABLE_MARK, parity_page(read_sections(rows)))


if __name__ == "__main__":
    renew_page(Path("docs/parity.md"), Path("docs/parity.yaml"))
