"""Rules for the config group ``checkpoint``."""

from __future__ import annotations

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig


def check_nvme_checkpoints(config: RunConfig) -> None:
    """Check that ``checkpoint`` requests no checkpoint inside a phase if zero.nvme_path is set.

    every_minutes is set by default and is accepted: the run then prints that it writes none.
    """
    if config.zero.nvme_path is None:
        return
    for key in ("every_steps", "stop_after", "best"):
        if (value := getattr(config.checkpoint, key)) is not None:
            raise ConfigError(
                f"checkpoint.{key}={value} with zero.nvme_path={config.zero.nvme_path}: a "
                "checkpoint inside a phase cannot read an optimizer that is on a drive; remove "
                f"checkpoint.{key}, or use zero=stage3_offload"
            )


def check_checkpoint(config: RunConfig) -> None:
    """Check that checkpoints can be written, and that the run measures checkpoint.best in time."""
    checkpoint = config.checkpoint
    check_nvme_checkpoints(config)
    if (stop := checkpoint.stop_after) is not None:
        name, _, step = stop.partition("/")
        if name not in config.phase.order or not step.isdecimal() or int(step) == 0:
            raise ConfigError(
                f"checkpoint.stop_after={stop}: must be PHASE/STEP, a phase of "
                f"{', '.join(config.phase.order)} and a step from 1 on, such as "
                f"{config.phase.order[-1]}/10"
            )
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
