"""Schema of the whole configuration: one dataclass per config group.

Values are in ``conf/``; types and meanings are here. If the type of a field allows None, its text
explains what null means. Batch sizes are global: they count the sequences of all ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlhf.config.choices import Phase, PlanMode, WandbMode
from rlhf.config.schema.hardware import HardwareConfig
from rlhf.config.schema.keys import (
    ABOVE_0,
    ANSWERING_PHASES,
    AT_LEAST_0,
    EVERY_PHASE,
    MINUTES,
    NO_PHASE,
    PORT,
    SECONDS,
    AtResume,
    Names,
    Unread,
    always_affects,
    key,
    needs,
)
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.rewards import RewardTerm
from rlhf.config.schema.supervised import DpoConfig, SftConfig
from rlhf.options import (
    CheckpointConfig,
    DataConfig,
    OptionGroups,
    PpoConfig,
    RewardConfig,
    RolloutConfig,
    ZeroConfig,
)


@dataclass(kw_only=True)
class PhaseConfig:
    """Keys for the phases of a run."""

    order: list[Phase]
    """Phases to run: some of sft, reward, ppo, dpo, in this order, each once; not ppo with dpo."""


AlarmName = StrEnum(
    "AlarmName",
    "not_finite reference_mismatch rollout_mismatch rollout_outliers no_change kl_runaway "
    "few_samples clipping entropy_collapse length few_end duplicates critic_useless "
    "score_against_gold fallbacks equal_scores equal_groups blind_updates",
)
"""Alarms during training (docs/troubleshooting.md)."""

IN_BOTH = Unread(
    ("alarms.stop", "alarms.mute"), lambda stop, mute: bool({*stop} & {*mute}), "name each once"
)


@dataclass(kw_only=True)
class AlarmsConfig:
    """Keys for alarms; by default an alarm prints a line and writes it to alarms.jsonl."""

    stop: list[AlarmName] = key(unread=[IN_BOTH])
    """Alarms that end the run."""
    mute: list[AlarmName] = key(unread=[IN_BOTH])
    """Alarms that are not raised."""


@dataclass(kw_only=True)
class LauncherConfig:
    """Keys for starting the ranks (docs/operations.md)."""

    dry_run: bool
    """Print the command that would start the ranks, then stop."""
    hostfile: str | None = key(names=Names.place)
    """File of nodes and slots for DeepSpeed; null: this node, or the SLURM job's nodes."""
    master_addr: str | None
    """Address of the first node; null: found automatically."""
    master_port: int | None = key(PORT)
    """Port on the first node where several nodes meet; null: one for this SLURM job, or 29500."""
    watchdog_minutes: float | None = key(MINUTES)
    """Minutes without a token, batch or saved tensor after which a run is ended; null: never."""
    timeout_minutes: float = key(MINUTES)
    """Minutes that ranks wait for one another, including data preparation."""


WANDB = needs("wandb", fix="add {group}=wandb")
TRACKED = Unread(
    ("wandb", "others"),
    lambda wandb, others: wandb is WandbMode.disabled and not others,
    "add {group}=wandb, mlflow or trackio",
)


@dataclass(kw_only=True)
class TrackingConfig:
    """Keys for the destinations of the metrics, besides metrics.jsonl and the terminal."""

    wandb: WandbMode
    """Weights & Biases: disabled, online or offline."""
    project: str = key(unread=[TRACKED])
    """Weights & Biases project."""
    entity: str | None = key(unread=[WANDB])
    """Weights & Biases team; null: your default."""
    tags: list[str] = key(unread=[TRACKED])
    """Tags of the Weights & Biases run."""
    upload: bool = key(unread=[WANDB])
    """Upload the models to Weights & Biases; false: its artifacts refer to their folders."""
    tensorboard: bool
    """Also write TensorBoard event files to RUN_DIR/tensorboard."""
    others: list[str]
    """Your own trackers, each as package.module:NAME (docs/watching.md)."""
    timeout_seconds: float = key(SECONDS, default=60.0)
    """Longest time for one call of a tracker; ten times as long at its start and end."""
    show_config: bool
    """Print the configuration as a tree before the run starts."""
    log_every: int | None = key(ABOVE_0)
    """Steps between two progress lines if the output is not a terminal; null: 30 seconds."""


@dataclass(kw_only=True)
class RunKeys:
    """The keys and groups that every run has; options add groups of their own."""

    name: str = key(affects=NO_PHASE, at_resume=AtResume.fixed)
    """Name of the run; its directories are in runs/<name>/."""
    seed: int = key(AT_LEAST_0, affects=EVERY_PHASE)
    """Seed of every random stream (of the data: data.seed); with from_run by default that run's."""
    run_dir: str | None = key(affects=NO_PHASE, at_resume=AtResume.fixed)
    """Directory of this run; null: runs/<name>/<timestamp>."""
    resume: str | None = key(affects=NO_PHASE, at_resume=AtResume.fixed)
    """Directory of a stopped run to resume; null: start a new run."""
    from_run: str | None = key(affects=NO_PHASE, at_resume=AtResume.fixed)
    """Finished run whose data, tokenizer, SFT and reward model this run uses; null: none."""
    trust_run: bool = key(affects=NO_PHASE)
    """With resume or from_run of another's run: use the code, addresses and files it names."""
    experiment: str | None = key(affects=NO_PHASE, at_resume=AtResume.fixed)
    """Recipe in conf/experiment; null: none."""
    plan: PlanMode = key(affects=NO_PHASE)
    """check: refuse runs that cannot fit; only: print memory, time, cost and stop; off: no plan."""
    # phase.order changes a phase only through the phases before it
    phase: PhaseConfig = key(affects=NO_PHASE, at_resume=AtResume.fixed)
    checkpoint: CheckpointConfig = key(affects=NO_PHASE)
    alarms: AlarmsConfig = key(affects=NO_PHASE)
    model: ModelConfig = key(affects=EVERY_PHASE, is_inherited=True)
    reward_model: ModelConfig = key(
        affects=always_affects(Phase.reward, Phase.ppo), is_inherited=True
    )
    hardware: HardwareConfig = key(affects=EVERY_PHASE)
    zero: ZeroConfig = key(affects=EVERY_PHASE, at_resume=AtResume.rounding)
    launcher: LauncherConfig = key(affects=NO_PHASE)
    sft: SftConfig = key(affects=always_affects(Phase.sft), is_inherited=True)
    reward: RewardConfig = key(affects=always_affects(Phase.reward), is_inherited=True)
    dpo: DpoConfig = key(affects=always_affects(Phase.dpo))
    ppo: PpoConfig = key(affects=always_affects(Phase.ppo))
    rollout: RolloutConfig = key(affects=ANSWERING_PHASES)
    rewards: dict[str, RewardTerm] = key(affects=always_affects(Phase.ppo))
    """Parts of which a score is the weighted sum (docs/rewards.md); {}: the reward model alone."""
    data: DataConfig = key(affects=EVERY_PHASE, is_inherited=True)
    tracking: TrackingConfig = key(affects=NO_PHASE)


@dataclass(kw_only=True)
class RunConfig(OptionGroups, RunKeys):
    """The whole configuration of one run."""

    @property
    def data_seed(self) -> int:
        """Return the seed of the examples and their division."""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def token_limit_after_prompt(self) -> tuple[str, int]:
        """Return the key, and its value, that limits the tokens of a response or of an episode."""
        if self.environment.is_used:
            return "environment.max_tokens", self.environment.max_tokens
        return "rollout.max_response_tokens", self.rollout.max_response_tokens

    @property
    def max_policy_tokens(self) -> int:
        """Return the maximum number of tokens that the policy can write after a prompt."""
        return self.environment.turn_limit * self.rollout.max_response_tokens
