"""Schema of the config group ``tracking``."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.choices import (
    WandbMode,
)
from rlhf.config.schema.keys import ABOVE_0, key


@dataclass(kw_only=True)
class TrackingConfig:
    """Destinations of the metrics, besides metrics.jsonl and the terminal."""

    wandb: WandbMode
    """Weights & Biases: disabled, online or offline."""
    project: str
    """Weights & Biases project."""
    entity: str | None
    """Weights & Biases team; null: your default."""
    tags: list[str]
    """Tags of the Weights & Biases run."""
    tensorboard: bool
    """Also write TensorBoard event files to RUN_DIR/tensorboard."""
    others: list[str]
    """Trackers of your own, each as package.module:NAME (docs/tracking.md)."""
    show_config: bool
    """Print the configuration as a tree before the run starts."""
    log_every: int = key(ABOVE_0)
    """Steps between two progress lines if the output is not a terminal."""
