"""Schema of the config group ``data``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf.config.choices import Phase, Source, Template
from rlhf.config.schema.keys import AT_LEAST_0, BETWEEN_0_AND_1, NO_PHASE, Unread, key


@dataclass(kw_only=True)
class DatasetConfig:
    """One dataset of a blend."""

    path: str
    """File, folder or hub id of the dataset."""
    subset: str | None = None
    """Configuration name of the hub dataset; null: the dataset's default."""
    revision: str | None = None
    """Revision of the hub dataset; null: the newest."""
    train_split: str = "train"
    """Split of the hub dataset to train on."""
    eval_split: str | None = None
    """Split of the hub dataset to hold out; null: a share of train_split is held out."""
    columns: dict[str, str] | None = None
    """JMESPath expressions of prompt, chosen, ... (docs/data.md); null: detect the layout."""
    weight: float = 1.0
    """How often training examples are used: 0.5 uses half of them, 2 uses each of them twice."""
    phases: list[Phase] | None = None
    """Only these phases use the dataset: some of sft, reward, ppo; null: all, by data.split."""


def _generated_by(source: Source) -> Unread:
    return Unread(
        lambda data: data.source is source,
        f"data.source={source} generates the examples",
        "use data=local or data=hub with data.path=FILE_OR_HUB_ID",
    )


GENERATED = [_generated_by(Source.synthetic), _generated_by(Source.environment)]


@dataclass(kw_only=True)
class DataKeys:
    """Sources of examples, and their division over phases."""

    source: Source
    """synthetic: the generated task; local: files or folders; hub: Hugging Face datasets."""
    path: Any
    """File, folder or hub id; a list blends several. null if data is generated or named in sets."""
    sets: dict[str, DatasetConfig] = key(unread=GENERATED)
    """Datasets to blend, each under a name; requires path=null."""
    eval_path: Any = key(unread=GENERATED)
    """Held-out examples, one entry per entry of path; null: the data's own, or a share of path."""
    eval_share: float = key(BETWEEN_0_AND_1)
    """Share of each phase's examples to hold out if the data has no held-out examples."""
    split: list[float]
    """Proportions of SFT, reward (also DPO) and PPO; phases that do not run get none."""
    size: int = key(AT_LEAST_0)
    """Examples to generate; with other sources, the number that plans assume (0: read the data)."""
    subset: str | None = key(unread=GENERATED)
    """Configuration name of the hub dataset; null: the dataset's default."""
    revision: str | None = key(unread=GENERATED)
    """Revision of the hub dataset; null: the newest."""
    train_split: str = key(unread=GENERATED)
    """Split of the hub dataset to train on."""
    eval_split: str | None = key(unread=GENERATED)
    """Split of the hub dataset to hold out; null: a share of train_split is held out."""
    clean: bool
    """Normalise white space, remove control characters, and skip examples that are then empty."""
    deduplicate: bool
    """Skip examples that repeat an earlier example of any dataset."""
    template: Template
    """plain: Human and Assistant; chat: the tokenizer's template; auto: chat if there is one."""
    bucket_by_length: bool
    """Put sequences of similar length into one micro-batch, which reduces padding."""
    cache_dir: str = key(affects=NO_PHASE, is_inherited=False)
    """Folder that keeps tokenised data between runs."""
