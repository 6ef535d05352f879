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
from rlhf.config.schema.run import RunConfig
from rlhf.data.reading import load_datasets
from rlhf.data.records import RawDataset, Record
from rlhf.data.splits import blend_datasets, check_usable_examples, divide_over_phases
from tests.conftest import Compose

from .row_tables import Rows, read_tables, records_of, write

pytestmark = pytest.mark.slow

(SETS,) = read_tables("hub_sets.yaml")


def write_splits(rows: Rows, splits: Sequence[str], folder: Path, *, is_saved: bool) -> None:
    """Write the rows as each split that the option names."""
    if is_saved:
        table = datasets.Dataset.from_list(rows)
        datasets.DatasetDict(dict.fromkeys(splits, table)).save_to_disk(folder)
        return
    for split in splits:
        write(folder / f"{split}.jsonl", rows)


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
    write_splits(case["rows"], splits, tmp_path, is_saved=bool(list(SETS).index(option) % 2))
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


def many_rows(option: str, count: int = 40) -> Rows:
    """The first row ``count`` times, each with a number in every text."""

    def numbered(value: Any, n: int) -> Any:
        if isinstance(value, dict):
            return {key: numbered(inner, n) for key, inner in value.items()}
        if isinstance(value, list):
            return [numbered(inner, n) for inner in value]
        if not isinstance(value, str):
            return value
        return value.replace("\n\nAssistant:", f" {n}\n\nAssistant:") + (
            "" if value.endswith((":", "\n")) else f" {n}"
        )

    return [numbered(SETS[option]["rows"][0], n) for n in range(count)]


@pytest.mark.parametrize("name", ["deepspeed_chat", "chinese"])
def test_blend_serves_the_whole_pipeline(name: str, compose: Compose, tmp_path: Path) -> None:
    overrides = [f"data={name}"]
    for option in BLENDS[name]:
        (tmp_path / option).mkdir()
        splits = ["train", *SETS[option].get("eval_split", "").split()]
        write_splits(many_rows(option), splits, tmp_path / option, is_saved=False)
        overrides += [
            f"data.sets.{option}.path={tmp_path / option}",
            f"++data.sets.{option}.eval_split=null",
        ]
    config: RunConfig = to_run_config(compose(overrides))
    data = config.data
    raw = load_datasets(data, seed=1)
    divided = divide_over_phases(raw, split=data.split, eval_share=data.eval_share, seed=1)
    parts = {phase: blend_datasets(of_sets, seed=1) for phase, of_sets in divided.items()}
    check_usable_examples(parts, list(Phase))
    keys = [{r.prompt for r in side} for part in parts.values() for side in (part.train, part.eval)]
    assert sum(map(len, keys)) == len(set().union(*keys))
    if name == "deepspeed_chat":  # rm_static and full_hh_rlhf hold the same rows here
        assert raw[0].left_out.total() == 0
        assert raw[1].left_out["repeats an earlier example"] > 0
    if name in {"chinese", "japanese"}:
        assert all(record.rejected for record in parts[Phase.reward].train)
