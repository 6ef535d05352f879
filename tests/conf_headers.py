"""The comments at the top of the files in conf/."""

from pathlib import Path
from typing import NamedTuple


class Header(NamedTuple):
    """A command that uses the file, its title, and the source of its numbers."""

    command: str
    title: str
    source: str | None


def read_header(path: Path) -> Header:
    """The header of a file in conf/: the command, then the title, then the source."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if lines[0].startswith("# @package"):
        lines = lines[1:]
    command, title, third = (line.removeprefix("# ") for line in lines[:3])
    assert command.startswith("python launch.py "), f"{path}: its first line must be a command"
    assert lines[1].startswith("# "), f"{path}: its second line must be a title"
    return Header(command, title, third.removeprefix("Source: ") if "Source: " in third else None)
