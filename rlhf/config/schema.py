"""What a run can be told: one dataclass per config group.

Values live in ``conf/``, types and meanings here; neither repeats the other. A field whose type
admits None says in its text what None stands for. Batch sizes are global: they count the sequences
of all ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf.config.choices import (
    LoraExport,
    LoraRole,
    ModelInit,
    Phase,
    PlanMode,
    Source,
    Template,
    WandbMode,
)
from rlhf.config.machine_schema import HardwareConfig, LauncherConfig, ZeroConfig
from rlhf.config.ppo_schema import PpoConfig, RolloutConfig
from rlhf.config.training_schema import DpoConfig, RewardConfig, SftConfig


@dataclass(kw_only=True)
class PhaseConfig:
    """Which phases run, in this order."""

    order: list[Phase]
    """Some of sft, reward, ppo, dpo, each once."""


@dataclass(kw_only=True)
class LearningRates:
    """Peak learning rates for one model, by what is trained."""

    sft: float
    reward: float
    actor: float
    critic: float
    dpo: float


@dataclass(kw_only=True)
class ModelConfig:
    """One model: its weights, or the shape to make them from."""

    init: ModelInit
    """pretrained: ``path``; random: ``architecture`` from scratch; sft: this run's SFT model."""
    path: str | None
    """HF folder or hub id."""
    revision: str | None
    """Hub revision; null: the newest."""
    tokenizer: str | None
    """Folder or hub id; null: beside the weights, or trained on the run's text for random ones."""
    end_token: str | None
    """Text of a token to end responses with, added where it is new; null: the tokenizer's own."""
    vocab_size: int
    """Tokens of a tokenizer trained on the run's own text."""
    architecture: dict[str, Any]
    """Fields of the HF config, ``model_type`` first; used where the weights are random."""
    dropout: float
    """Dropout while the sft phase trains model, and the reward phase reward_model."""
    learning_rates: LearningRates
    """Peaks that suit the model; ``sft.lr`` and the other phases' learning rates refer to them."""
    gradient_checkpointing: bool | int
    """Compute activations again in the backward pass instead of keeping them: slower, smaller.

    A number is that of the first layers that do so.
    """
    attention: str | None
    """matmul (this project's; sdpa on a GPU), eager, sdpa, flash_attention_2; null: matmul."""
    trust_remote_code: bool
    """Run the model's own Python code. Only for repositories you have read."""


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685), through peft."""

    rank: int
    """Rank of an adapter; 0: no adapters."""
    alpha: float
    """The adapter's output is multiplied by alpha / rank."""
    dropout: float
    """Dropout before the adapters."""
    target_modules: list[str] | None
    """Endings of the names of adapted layers; null: all linear layers but the output's."""
    roles: list[LoraRole]
    """Models that get adapters: some of sft, reward, actor, critic."""
    train_rest: bool
    """Train what has no adapter too: embeddings, norms, biases (DeepSpeed-Chat's way)."""
    lr: float | None
    """Peak learning rate of adapters; null: that of the phase."""
    critic_rank: int | None
    """Rank in the critic; null: the same."""
    critic_lr: float | None
    """Peak learning rate of the critic's adapters; null: that of the phase."""
    export: LoraExport
    """merged: an ordinary model folder; adapter: a peft folder beside the base that it names."""


@dataclass(kw_only=True)
class DatasetConfig:
    """One data set of a blend."""

    path: str
    """Hub id, folder or file."""
    subset: str | None = None
    """Hub data set's configuration name."""
    revision: str | None = None
    """Hub revision; null: the newest."""
    train_split: str = "train"
    """Split to train on."""
    eval_split: str | None = None
    """Split held out; null: a share of train_split."""
    columns: dict[str, Any] | None = None
    """How its columns become prompt, chosen, rejected and text (docs/data.md); null: by layout."""
    weight: float = 1.0
    """Times that its training examples are taken: 0.5 takes half of them, 2 each twice."""
    phases: list[Phase] | None = None
    """The only phases that it is for, some of sft, reward, ppo; null: all, by data.split."""


@dataclass(kw_only=True)
class DataConfig:
    """The examples and how they are divided."""

    source: Source
    """synthetic, local or hub."""
    path: Any
    """File, folder or hub id; a list of them blends several."""
    sets: dict[str, DatasetConfig]
    """Data sets to blend, each under a name; used where path is null."""
    eval_path: Any
    """The same for held-out examples; null: a share of ``path``."""
    eval_share: float
    """Share of each phase's part that is held out, where there is no eval_path."""
    split: list[float]
    """Proportions of the SFT, reward (and DPO), and PPO phases."""
    size: int
    """Examples to generate (synthetic); elsewhere those that plans count on, 0: a file's lines."""
    subset: str | None
    """Hub data set's configuration name."""
    revision: str | None
    """Hub revision; null: the newest."""
    train_split: str
    """Hub split to train on."""
    eval_split: str | None
    """Hub split held out; null: a share of train_split."""
    clean: bool
    """Mend white space and control characters, and leave out what is then empty."""
    deduplicate: bool
    """Leave out examples that an earlier one repeats, in whatever set."""
    template: Template
    bucket_by_length: bool
    """Cut each batch into micro-batches of sequences of similar length: less padding."""
    ptx_path: str | None
    """Text to mix into PPO (ppo.ptx_coef): hub id, folder or file; null: the SFT examples."""
    ptx_subset: str | None
    """Hub configuration name of ptx_path."""
    ptx_column: str
    """Column of ptx_path that holds the text."""
    cache_dir: str
    """Where tokenised data is kept between runs."""


@dataclass(kw_only=True)
class TrackingConfig:
    """Who is told the metrics, besides metrics.jsonl and the terminal."""

    wandb: WandbMode
    """disabled, online or offline."""
    project: str
    """Weights & Biases project."""
    entity: str | None
    """Weights & Biases team; null: your default."""
    tags: list[str]
    tensorboard: bool
    """Write TensorBoard's event files into RUN_DIR/tensorboard too."""
    log_every: int
    """Steps between two lines where there is no terminal."""


@dataclass(kw_only=True)
class RunConfig:
    """Everything about one run."""

    name: str
    """Runs are kept under runs/<name>/."""
    seed: int
    """Every random stream derives from it."""
    run_dir: str | None
    """Directory of this run; null: runs/<name>/<timestamp>."""
    resume: str | None
    """Directory of a stopped run to go on with."""
    experiment: str | None
    """The recipe that was chosen, if any."""
    plan: PlanMode
    """check: refuse what cannot fit; only: print memory, time and cost, and stop; off: no plan."""
    phase: PhaseConfig
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
    data: DataConfig
    tracking: TrackingConfig
