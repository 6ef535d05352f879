"""Read plain text to mix into PPO, and cut it into blocks of token ids.

``data.ptx_path`` is a folder written by datasets.save_to_disk, a file (.txt with blank lines
between texts, .jsonl, .json, .csv, .parquet), a folder of such files, or a hub id.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlhf.base.errors import DataError
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase
from rlhf.config.schema.data import DatasetConfig
from rlhf.config.schema.run import RunConfig
from rlhf.data.encoding import Encoder
from rlhf.data.files import READERS, Chunk, open_text
from rlhf.data.records import Record, Row
from rlhf.data.splits import PhaseData
from rlhf.data.tables import (
    Table,
    Tables,
    divide_tables_by_name,
    download_dataset,
    find_local_tables,
    is_saved_dataset,
    iterate_rows,
)
from rlhf.data.tokens import Limit, sft_columns
from rlhf.options import DataConfig, PpoConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 1000  # number of texts that are tokenized at once


class PtxBlocks(NamedTuple):
    """Training and held-out blocks of token ids; either list may be empty."""

    train: list[list[int]]
    eval: list[list[int]]


def reads_corpus(ppo: PpoConfig, data: DataConfig) -> bool:
    """Return True if PPO learns from a corpus, or measures its perplexity on one."""
    return bool(ppo.ptx_coef or (ppo.ptx_eval_blocks and data.ptx_path is not None))


def check_corpus(
    config: RunConfig, phases: Collection[Phase], is_quick: Callable[[str, str], bool]
) -> None:
    """Raise a DataError if the corpus that PPO reads is missing or has no text.

    The corpus at ``place``, the value of ``key``, is read only if ``is_quick(key, place)`` is True.
    """
    data, place = config.data, config.data.ptx_path
    if Phase.ppo not in phases or place is None or not is_quick("data.ptx_path", place):
        return
    if reads_corpus(config.ppo, data):
        load_ptx_texts(data, seed=config.data_seed)


def build_ptx_blocks(
    config: DataConfig,
    sft_part: PhaseData | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    block_tokens: int,
    seed: int,
    learns: bool = True,
) -> PtxBlocks:
    """Return blocks of the text at data.ptx_path, or of the SFT examples if that key is null.

    If ``learns`` is False, only held-out blocks are built, since tokenizing a whole corpus takes
    long. SFT examples give no held-out blocks: most of their tokens are prompts, which SFT does not
    learn. Raises DataError if there is no text.
    """
    if config.ptx_path is not None:
        texts, held_out = load_ptx_texts(config, seed=seed)
        cut = partial(cut_texts, encoder=Encoder(tokenizer), block_tokens=block_tokens)
        return PtxBlocks(cut(texts if learns else []), cut(held_out))
    records = sft_part.train if learns and sft_part else []
    encoder = Encoder(tokenizer, config.template)
    train = cut_into_blocks(_encode_sft_examples(records, encoder), block_tokens=block_tokens)
    if learns and not train:
        raise DataError(
            "data.ptx_path=null: ppo.ptx_coef then uses the SFT examples, and there are no SFT "
            "examples; set data.ptx_path, give the SFT phase a share of data.split, or set "
            "ppo.ptx_coef=0"
        )
    return PtxBlocks(train, [])


def cut_texts(texts: Sequence[str], encoder: Encoder, *, block_tokens: int) -> list[list[int]]:
    """Tokenize ``texts`` with end tokens; cut the ids into blocks of ``block_tokens`` ids."""
    chunks = (list(texts[start : start + CHUNK]) for start in range(0, len(texts), CHUNK))
    return cut_into_blocks(
        (ids for chunk in chunks for ids in encoder.encode_texts_with_end(chunk)),
        block_tokens=block_tokens,
    )


def cut_into_blocks(sequences: Iterable[list[int]], *, block_tokens: int) -> list[list[int]]:
    """Concatenate ``sequences`` and cut them into blocks of ``block_tokens``; drop the remainder.

    If there is less than one block, return one short block.
    """
    blocks: list[list[int]] = []
    rest: list[int] = []
    for ids in sequences:
        rest += ids
        whole = len(rest) - len(rest) % block_tokens
        blocks += [rest[start : start + block_tokens] for start in range(0, whole, block_tokens)]
        rest = rest[whole:]
    return blocks or ([rest] if rest else [])


def load_ptx_texts(config: DataConfig, *, seed: int) -> tuple[list[str], list[str]]:
    """Return the training texts at data.ptx_path, and the held-out texts.

    Files with a word such as eval in their names are held out. Without such files, the share
    data.eval_share of the texts is drawn with ``seed`` and held out; a single text is learned.

    Raises:
        DataError: if there is no text, or the text cannot be read.
    """
    texts, held_out_texts = _read_ptx_texts(config)
    if config.deduplicate:
        texts = list(dict.fromkeys(texts))
    if not texts:
        raise DataError(
            f"data.ptx_path={config.ptx_path} holds no text; use a file with text, or "
            "data.ptx_path=null for the SFT examples"
        )
    random.Random(f"ptx-{seed}").shuffle(texts)
    if held_out_texts:
        return texts, held_out_texts
    held_out = min(max(round(len(texts) * config.eval_share), 1), len(texts) - 1)
    return texts[held_out:], texts[:held_out]


def _encode_sft_examples(records: Sequence[Record], encoder: Encoder) -> Iterator[list[int]]:
    """Yield the token ids of the sequence that SFT makes of each record."""
    for start in range(0, len(records), CHUNK):
        rows = list(enumerate(records[start : start + CHUNK]))
        columns, _ = sft_columns(rows, encoder, Limit("none", sys.maxsize))
        yield from columns["ids"]


def _read_ptx_texts(config: DataConfig) -> tuple[list[str], list[str]]:
    def read(tables: list[Table]) -> list[str]:
        columns = (_read_column(iterate_rows(each), column=config.ptx_column) for each in tables)
        return [text for texts in columns for text in texts]

    try:
        splits = find_ptx_tables(config)
        return read(splits.train), read(splits.eval)
    except DataError as error:
        raise DataError(f"data.ptx_path: {error}") from error


def find_ptx_tables(config: DataConfig) -> Tables:
    """Return the tables at data.ptx_path: a table per file, or the training split of a dataset."""
    path = str(config.ptx_path)
    place = expand_user_path(path, key="data.ptx_path")
    if place.exists() and not is_saved_dataset(place):
        return divide_tables_by_name(find_local_tables(place, {".txt": _read_text, **READERS}))
    fix = "use the path of a downloaded copy: there is no such file or folder here."
    hub_dataset = DatasetConfig(path=path, subset=config.ptx_subset)
    splits = find_local_tables(place) if place.exists() else download_dataset(hub_dataset, fix=fix)
    return Tables([splits.get("train") or next(iter(splits.values()))], [])


def _read_text(file: Path) -> Iterator[Chunk]:
    with open_text(file) as opened:
        parts = opened.read().split("\n\n")
    yield lambda: enumerate(({"text": part.strip()} for part in parts), 1)


def _read_column(rows: Iterable[Row], *, column: str) -> Iterator[str]:
    """Yield the texts in ``column``, or in the first text column if the first row lacks it."""
    name = None
    for row in rows:
        if name is None:
            with_text = [key for key, value in row.values.items() if isinstance(value, str)]
            name = column if column in row.values else next(iter(with_text), None)
        value = None if name is None else row.values.get(name)
        if name is None or not isinstance(value, str | None):
            raise row.build_error(
                f"no text in column {name or column!r}; the row has the columns "
                f"{', '.join(map(str, row.values))}. Set data.ptx_column=NAME"
            )
        if value and value.strip():
            yield value
