"""Schema and rules of the config group ``data``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import SPLIT_PHASES, Phase, Source, Template
from rlhf.config.schema.keys import (
    ABOVE_0,
    AT_LEAST_0,
    BETWEEN_0_AND_1,
    NO_PHASE,
    Names,
    key,
    needs,
)

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig


@dataclass(kw_only=True)
class DatasetConfig:
    """Keys of one of the datasets in data.sets, which are blended."""

    path: str = key(names=Names.place)
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
    weight: float = key(ABOVE_0, default=1.0)
    """How often training examples are used: 0.5 uses half of them, 2 uses each of them twice."""
    phases: list[Phase] | None = None
    """Only these phases use the dataset: some of sft, reward, ppo; null: all, by data.split."""


GENERATED = [
    needs("source", "local", "hub", fix="use data=local or data=hub with data.path=FILE_OR_HUB_ID")
]


@dataclass(kw_only=True)
class DataKeys:
    """Keys for the sources of examples, and for their division over phases."""

    source: Source
    """synthetic: the generated task; local: files or folders; hub: Hugging Face datasets."""
    path: Any = key(names=Names.place)
    """File, folder or hub id; a list blends several. null if data is generated or named in sets."""
    sets: dict[str, DatasetConfig] = key(unread=GENERATED)
    """Datasets to blend, each under a name; requires path=null."""
    eval_path: Any = key(unread=GENERATED, names=Names.place)
    """Held-out examples, one entry per entry of path; null: the data's own, or a share of path."""
    eval_share: float = key(BETWEEN_0_AND_1)
    """Share of each phase's examples to hold out if the data has no held-out examples."""
    split: list[float]
    """Proportions of SFT, reward (also DPO) and PPO; if several phases run, the others get none."""
    seed: int | None = key(AT_LEAST_0)
    """Seed of the split into phases, generated examples and label noise; null: seed."""
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
    cache_dir: str = key(affects=NO_PHASE, is_inherited=False, names=Names.place)
    """Folder that keeps tokenised data between runs."""


def check_data(config: RunConfig) -> None:
    """Check that the source can supply examples to every phase that runs."""
    data, order = config.data, config.phase.order
    is_generated = data.source in (Source.synthetic, Source.environment)
    paths = {"data.path": data.path} if not (data.path is None and data.sets) else {}
    paths |= {"data.eval_path": data.eval_path} if data.eval_path is not None else {}
    shares = dict(zip(SPLIT_PHASES, data.split, strict=False))
    set_phases = {phase for dataset in data.sets.values() for phase in dataset.phases or ()}
    fix = "make the number of {0} positive, or remove {0} from phase.order"
    if config.from_run is not None:
        fix = (
            f"from_run={config.from_run} fixed data.split; run phases that have a share, such as "
            "phase=pipeline_rule, or start a new run without from_run"
        )
    broken = {
        f"data.path={data.path}: generated data has no path; add data=local, or data=hub": (
            is_generated and data.path is not None
        ),
        f"data.size=0: must be positive for data={data.source}; use e.g. data.size=4000": (
            is_generated and not data.size
        ),
        **{
            f"{key}={'null' if value is None else value}: must be a file, a folder or a hub id, or "
            "a list of them": not (_are_paths(value) or (is_generated and key == "data.path"))
            for key, value in paths.items()
        },
        **{
            f"data.sets.{name}.columns.{column}={expression}: must be a JMESPath expression": (
                not isinstance(expression, str)  # OmegaConf does not check its type
            )
            for name, dataset in data.sets.items()
            for column, expression in (dataset.columns or {}).items()
        },
        **{
            f"data.sets.{name}.phases={[p.value for p in dataset.phases or ()]}: choose among "
            f"{', '.join(SPLIT_PHASES)}; dpo learns from the reward phase's pairs": (
                not set(dataset.phases or ()) <= set(SPLIT_PHASES)
            )
            for name, dataset in data.sets.items()
        },
        f"data.split={data.split}: must be three numbers, each 0 or more: the proportions of sft, "
        "reward and ppo": (
            len(data.split) != len(SPLIT_PHASES) or not all(0 <= s < math.inf for s in data.split)
        ),
        **{
            f"data.split={data.split}: the {phase} phase runs but gets no data; "
            f"{fix.format(phase)}": not shares.get(phase.phase_in_split) and phase not in set_phases
            for phase in order
        },
    }
    refuse_broken_rule(broken)


def _are_paths(value: Any) -> bool:
    paths = value if isinstance(value, list) else [value]
    return bool(paths) and all(isinstance(path, str) and path for path in paths)


def drop_shares_of_absent_phases(config: RunConfig) -> RunConfig:
    """Return ``config`` with a share of 0 in data.split for every phase that does not run.

    A run of a single phase keeps all shares: other phases may have runs of their own, and with the
    same data and seed no prompt is in two of these runs. A run with from_run keeps the division of
    the finished run.
    """
    order = config.phase.order
    if len(order) == 1 or config.from_run is not None:
        return config
    kept = {phase.phase_in_split for phase in order}
    shares = zip(SPLIT_PHASES, config.data.split, strict=True)
    split = [share if phase in kept else 0.0 for phase, share in shares]
    return replace(config, data=replace(config.data, split=split))
