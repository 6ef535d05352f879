"""Pages of docs/ whose lower part is made from what is in the code."""

from __future__ import annotations

from pathlib import Path


def write_below(path: Path, mark: str, text: str) -> None:
    """Write ``text`` into ``path`` below its line ``mark``; what stands above is kept.

    Raises:
        ValueError: the page has no such line.
    """
    introduction, found, _ = path.read_text(encoding="utf-8").partition(mark)
    if not found:
        raise ValueError(f"{path} has no line {mark!r} to write the tables below")
    path.write_text(introduction + mark + "\n" + text, encoding="utf-8")
