"""Functions shared by the documentation generators."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hydra import compose, initialize_config_dir

from rlhf.config.freeze import to_run_config
from rlhf.config.schema.run import RunConfig


def composed(conf: Path, *overrides: str) -> RunConfig:
    """Return the config that ``python launch.py`` would run with these ``overrides``.

    Raises:
        ConfigError: if the config breaks a rule.
    """
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        return to_run_config(compose("config", list(overrides)))


class Header(NamedTuple):
    """The comments at the top of a file in conf/."""

    command: str
    title: str
    source: str | None


def read_header(path: Path) -> Header:
    """Return the header of a file in conf/: the command, then the title, then the source.

    Raises:
        ValueError: if the file does not begin with a command and a title.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    if lines[0].startswith("# @package"):
        lines = lines[1:]
    command, title, third = (line.removeprefix("# ") for line in lines[:3])
    if not command.startswith("python launch.py ") or not lines[1].startswith("# "):
        raise ValueError(f"{path}: its first lines must be '# python launch.py ...' and a title")
    return Header(command, title, third.removeprefix("Source: ") if "Source: " in third else None)


def write_below(path: Path, mark: str, text: str) -> None:
    """Replace the text below the line ``mark`` in ``path`` with ``text``; keep the text above it.

    Raises:
        ValueError: if the page has no such line.
    """
    introduction, found, _ = path.read_text(encoding="utf-8").partition(mark)
    if not found:
        raise ValueError(f"{path} has no line {mark!r} to write the tables below")
    path.write_text(introduction + mark + "\n" + text, encoding="utf-8")
