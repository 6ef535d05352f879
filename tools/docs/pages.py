"""Functions shared by the documentation generators."""

from __future__ import annotations

from pathlib import Path

from hydra import compose

from rlhf.config.hydra_parts import composing
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import to_run_config


def composed(conf: Path, *overrides: str) -> RunConfig:
    """Return the config that ``python launch.py`` would run with these ``overrides``.

    Raises:
        ConfigError: if the config breaks a rule.
    """
    with composing(conf):
        return to_run_config(compose("config", list(overrides)))


def write_below(path: Path, mark: str, text: str) -> None:
    """Replace the text below the line ``mark`` in ``path`` with ``text``; keep the text above it.

    Raises:
        ValueError: if the page has no such line.
    """
    introduction, found, _ = path.read_text(encoding="utf-8").partition(mark)
    if not found:
        raise ValueError(f"{path} has no line {mark!r} to write the tables below")
    path.write_text(introduction + mark + "\n" + text, encoding="utf-8")
