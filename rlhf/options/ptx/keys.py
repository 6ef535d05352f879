"""Keys of the pretraining loss: weight and batches in the group ppo, corpus in the group data."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import AT_LEAST_0, ONLY_PPO, ROWS, Names, Unread, key, needs

MEASURED = Unread(
    ("ptx_coef", "data.ptx_path"),
    lambda weight, path: not weight and path is None,
    "add data.ptx_path=FILE",
)
CORPUS = needs("ptx_path", fix="add {key}=FILE")


@dataclass(kw_only=True)
class PtxKeys:
    """Keys of the group ``ppo`` for the weight and the batches of the pretraining loss."""

    ptx_coef: float = key(AT_LEAST_0)
    """Weight of the language-model loss on data.ptx_path (InstructGPT's gamma); 0: none."""
    ptx_batch_size: int | None = key(ROWS, unread=[needs("ptx_coef", fix="add {key}=1")])
    """Blocks of the corpus per optimizer step, over all ranks; null: mini_batch_size."""
    ptx_eval_blocks: int = key(AT_LEAST_0, unread=[MEASURED])
    """Maximum held-out blocks of data.ptx_path to measure perplexity on; 0: do not measure it."""


@dataclass(kw_only=True)
class PtxDataKeys:
    """Keys of the group ``data`` for the corpus of the pretraining loss."""

    ptx_path: str | None = key(affects=ONLY_PPO, is_inherited=False, names=Names.place)
    """Corpus to mix into PPO (ppo.ptx_coef): file, folder or hub id; null: the SFT examples."""
    ptx_subset: str | None = key(affects=ONLY_PPO, is_inherited=False, unread=[CORPUS])
    """Configuration name of ptx_path on the hub; null: the dataset's default."""
    ptx_column: str = key(affects=ONLY_PPO, is_inherited=False, unread=[CORPUS])
    """Column of ptx_path that holds the text."""
