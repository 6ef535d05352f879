"""Schema of the whole configuration: one dataclass per config group.

Values are in ``conf/``; types and meanings are here. If the type of a field allows None, its text
explains what null means. Batch sizes are global: they count the sequences of all ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.choices import (
    AlarmName,
    Phase,
    PlanMode,
    Reuse,
)
from rlhf.config.schema.bounds import ABOVE_0, AT_LEAST_0, SECONDS, bounded
from rlhf.config.schema.data import DataConfig
from rlhf.config.schema.dpo import DpoConfig
from rlhf.config.schema.hardware import HardwareConfig
from rlhf.config.schema.launcher import LauncherConfig
from rlhf.config.schema.lora import LoraConfig
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.ppo import PpoConfig
from rlhf.config.schema.reward import RewardConfig
from rlhf.config.schema.rewards import RewardPart
from rlhf.config.schema.rollout import RolloutConfig
from rlhf.config.schema.sft import SftConfig
from rlhf.config.schema.tracking import TrackingConfig
from rlhf.config.schema.zero import ZeroConfig


@dataclass(kw_only=True)
class PhaseConfig:
    """The phases of a run."""

    order: list[Phase]
    """Phases to run: some of sft, reward, ppo, dpo, in this order, each once; not ppo with dpo."""


@dataclass(kw_only=True)
class ReuseConfig:
    """The store of finished phases: runs whose SFT or reward phase have equal inputs share it."""

    phases: Reuse
    """sweep: jobs of a sweep take phases from the store; always: all runs; never: none."""
    max_gib: float = bounded(ABOVE_0)
    """Size of the store, GiB; above it the phases used least recently are removed."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """Checkpoints inside a phase, from which resume continues (docs/resume.md)."""

    every_minutes: float | None = bounded(ABOVE_0)
    """Minutes between checkpoints; null: not by time."""
    every_steps: int | None = bounded(ABOVE_0)
    """Steps between checkpoints; null: not by steps."""
    keep: int = bounded(ABOVE_0)
    """Latest checkpoints that are kept; the best one is kept beside them."""
    keep_finished: bool
    """Keep the checkpoints of a finished phase too, for python -m rlhf.export."""
    best: str | None
    """Held-out metric whose best checkpoint is kept, such as ppo/eval_score; null: none."""
    load_best: bool
    """End the phase of the metric with its best checkpoint instead of the last step."""
    patience: int | None = bounded(ABOVE_0)
    """End the phase after this many evaluations in a row without a new best; null: never."""
    most_skipped: int | None = bounded(ABOVE_0)
    """Steps in a row with gradients that are not finite after which the run ends; null: never."""
    grace_seconds: int = bounded(SECONDS)
    """Seconds after SIGTERM in which a step may end and a checkpoint be written."""


@dataclass(kw_only=True)
class AlarmsConfig:
    """Alarms during training: what they do besides a line on the terminal and in alarms.jsonl."""

    stop: list[AlarmName]
    """Alarms that end the run."""
    mute: list[AlarmName]
    """Alarms that are not raised."""


@dataclass(kw_only=True)
class RunConfig:
    """The whole configuration of one run."""

    name: str
    """Name of the run; its directories are in runs/<name>/."""
    seed: int = bounded(AT_LEAST_0)
    """Seed of every random stream."""
    run_dir: str | None
    """Directory of this run; null: runs/<name>/<timestamp>."""
    resume: str | None
    """Directory of a stopped run to resume; null: start a new run."""
    from_run: str | None
    """Finished run whose data, tokenizer, SFT and reward model this run uses; null: none."""
    experiment: str | None
    """Recipe in conf/experiment; null: none."""
    plan: PlanMode
    """check: refuse runs that cannot fit; only: print memory, time, cost and stop; off: no plan."""
    phase: PhaseConfig
    reuse: ReuseConfig
    checkpoint: CheckpointConfig
    alarms: AlarmsConfig
    model: ModelConfig
    reward_model: ModelConfig
    hardware: HardwareConfig
    zero: ZeroConfig
    launcher: LauncherConfig
    lora: LoraConfig
    sft: SftConfig
    reward: RewardConfig
    dpo: DpoConfig
    ppo: PpoConfig
    rollout: RolloutConfig
    rewards: dict[str, RewardPart]
    """Parts of which a score is the weighted sum (docs/rewards.md); {}: the reward model alone."""
    data: DataConfig
    tracking: TrackingConfig
