"""A configuration from overrides, outside of a Hydra job: for pages and comparisons."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir

from rlhf.config.freeze import to_run_config
from rlhf.config.schema import RunConfig


def composed(conf: Path, *overrides: str) -> RunConfig:
    """What ``python launch.py`` with these ``overrides`` would run.

    Raises:
        ConfigError: it breaks a rule.
    """
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        return to_run_config(compose("config", list(overrides)))
