"""The sixteen data sets of DeepSpeed-Chat: rows in their documented columns become records.

No network here: each set is read from a copy on disk, its path the only thing that differs from its
option in conf/data. What the hub holds today is not checked.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from omegaconf import OmegaConf

from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from rlhf.data.reading import load_datasets
from rlhf.data.records import RawDataset, Record
from tests.conftest import Compose

from .row_tables import read_tables, records_of, write

pytestmark = pytest.mark.slow

(SETS,) = read_tables("hub_sets.yaml")


def load(compose: Compose, option: str, *overrides: str) -> list[RawDataset]:
    config = to_run_config(compose([f"data={option}", "data.deduplicate=false", *overrides]))
    return load_datasets(config.data, seed=config.seed)


def texts_of(records: Sequence[Record]) -> list[Record]:
    """Return the records without their places, and without messages, which their prompts show."""
    assert all(record.place is not None for record in records)
    return [record._replace(place=None, messages=None) for record in records]


@pytest.mark.parametrize("option", SETS)
def test_rows_become_records(option: str, tmp_path: Path, compose: Compose) -> None:
    case, records = SETS[option], records_of(SETS[option], [0])
    splits = ["train", *case.get("eval_split", "").split()]
    # Any set can be read from both forms; every other one takes the second.
    if list(SETS).index(option) % 2:
        table = datasets.Dataset.from_list(case["rows"])
        datasets.DatasetDict(dict.fromkeys(splits, table)).save_to_disk(tmp_path)
    else:
        for split in splits:
            write(tmp_path / f"{split}.jsonl", case["rows"])
    (dataset,) = load(compose, option, f"data.sets.{option}.path={tmp_path}")
    assert dataset.name == option
    hub_set = to_run_config(compose([f"data={option}"])).data.sets[option]
    assert hub_set.path == case["hub_id"]
    assert texts_of(dataset.train) == records
    held_out = None if dataset.eval is None else texts_of(dataset.eval)
    assert held_out == (records if "eval_split" in case else None)
    left_out = {reason: len(splits) * n for reason, n in case.get("left_out", {}).items()}
    assert dataset.left_out == left_out
    is_pairs = case.get("is_pairs", True)
    assert any(record.rejected for record in dataset.train) is is_pairs
    assert dataset.phases == (None if is_pairs else [Phase.sft, Phase.ppo])


# ------------------------------------------------------------------------------------------ blends


BLENDS = {
    "deepspeed_chat": ["rm_static", "full_hh_rlhf", "synthetic_instruct", "rlhf_reward_datasets"],
    "chinese": ["zhihu_kol", "miracl_zh", "hc3_chinese", "mkqa_chinese"],
    "japanese": ["mkqa_japanese", "miracl_ja", "qg_jaquad", "qag_jaquad"],
}
BLENDS["deepspeed_chat_benchmark"] = [*BLENDS["deepspeed_chat"], "webgpt_comparisons", "shp"]


def test_blend_is_the_union_of_its_sets(compose: Compose) -> None:
    for name, options in BLENDS.items():
        blended: Any = OmegaConf.to_container(compose([f"data={name}"]).data.sets)
        assert list(blended) == options
        for option in options:
            alone: Any = OmegaConf.to_container(compose([f"data={option}"]).data.sets[option])
            only_sft = {"phases": ["sft"]} if name in {"chinese", "japanese"} else {}
            assert blended[option] == (alone | only_sft if "phases" in alone else alone)
