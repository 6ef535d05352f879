"""Numbers that the reward model's loss reads of each pair, and named groups of pairs."""

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from rlhf.base.errors import DataError
from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.data import DatasetConfig
from rlhf.data.pair_numbers import add_pair_numbers, read_pair_groups
from rlhf.data.reading import load_datasets
from rlhf.data.records import Record
from tests.conftest import Compose
from tests.data.row_tables import config_of, write

MARGIN = "reward.margin_column=strength"
SCORES = ["reward.loss=regression", "reward.score_columns=[good,bad]"]


def pair(name: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": f"{name}:", "chosen": " yes", "rejected": " no", **columns}


def test_tokenised_pairs_get_the_numbers_of_their_records(compose: Compose) -> None:
    columns = [{"strength": 2, "good": 0.5, "bad": -1}, {"strength": 0.5, "good": 1, "bad": 0}]
    records = [Record(prompt=name, columns=each) for name, each in zip("ab", columns, strict=True)]
    examples = Dataset.from_dict({"row": [1, 0]})  # the first record is the second example
    local = ["data=local", "data.path=x"]
    config = to_run_config(compose([*local, MARGIN])).reward
    assert add_pair_numbers(examples, records, config)["margin"][:] == [0.5, 2.0]
    config = to_run_config(compose([*local, *SCORES])).reward
    found = add_pair_numbers(examples, records, config)
    assert (found["chosen_score"][:], found["rejected_score"][:]) == ([1.0, 0.5], [0.0, -1.0])


@pytest.mark.parametrize("value", [None, "2", True, float("nan"), [1]])
def test_a_margin_that_is_no_number_is_refused(value: Any, compose: Compose) -> None:
    config = to_run_config(compose(["data=local", "data.path=x", MARGIN])).reward
    records = [Record(prompt="how many?", columns={"strength": value})]
    message = re.escape(f"reward.margin_column: the column 'strength' holds {value!r}")
    with pytest.raises(DataError, match=f"{message}.*how many"):
        add_pair_numbers(Dataset.from_dict({"row": [0]}), records, config)


def test_only_data_of_the_reward_phase_needs_its_columns(tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.jsonl", [pair("a", strength=2)])
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "b:"}])
    sets = {
        "pairs": DatasetConfig(path=str(pairs), phases=[Phase.sft, Phase.reward]),
        "prompts": DatasetConfig(path=str(prompts), phases=[Phase.ppo]),
    }
    config = config_of(None, sets=sets)
    keep = {"strength": "reward.margin_column"}
    first, second = load_datasets(config, seed=1, keep=keep)
    assert first.train[0].columns == {"strength": 2}
    assert not second.train[0].columns
    with pytest.raises(DataError, match=r"'level' is missing; reward\.margin_column"):
        load_datasets(config, seed=1, keep={"level": "reward.margin_column"})


def test_groups_are_read_by_name_and_others_refused(tmp_path: Path) -> None:
    rows = [pair(n, group=g) for n, g in (("a", "chat"), ("b", "safety"), ("c", "chat"))]
    groups = read_pair_groups(str(write(tmp_path / "groups.jsonl", rows)))
    assert {name: [r.prompt for r in each] for name, each in groups.items()} == {
        "chat": ["a:", "c:"],
        "safety": ["b:"],
    }
    assert read_pair_groups(None) == {}
    for row, message in (
        (pair("a"), "'group' is missing; reward.groups_path names"),
        ({"prompt": "a:", "completion": " b", "group": "x"}, "reward.groups_path needs pairs"),
    ):
        with pytest.raises(DataError, match=message):
            read_pair_groups(str(write(tmp_path / "others.jsonl", [row])))
