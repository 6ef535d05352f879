"""Rules for the config group ``checkpoint``."""

from __future__ import annotations

from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.errors import ConfigError


def check_checkpoint(config: RunConfig) -> None:
    """Check that a metric decides what is best, and that it is measured between steps."""
    checkpoint = config.checkpoint
    if checkpoint.best is None:
        for key in ("load_best", "patience"):
            if value := getattr(checkpoint, key):
                raise ConfigError(
                    f"checkpoint.{key}={str(value).lower()}: no metric says what is best; add "
                    "checkpoint.best=ppo/eval_score, or that of another phase"
                )
        return
    name, _, metric = checkpoint.best.partition("/")
    if name not in config.phase.order or not metric.startswith("eval_"):
        raise ConfigError(
            f"checkpoint.best={checkpoint.best}: must be a held-out metric PHASE/eval_NAME of "
            f"{', '.join(config.phase.order)} (docs/metrics.md)"
        )
    if not getattr(config, Phase(name)).eval_every:
        raise ConfigError(
            f"checkpoint.best={checkpoint.best} with {name}.eval_every=0: the metric is measured "
            f"only at the end; set {name}.eval_every to a number of steps"
        )
