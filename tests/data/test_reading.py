"""Whatever holds the rows, the same records come out; whatever is wrong is said with its place."""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pytest

from rlhf.base.errors import ConfigError, DataError
from rlhf.config.choices import Phase, Source
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.data import DatasetConfig
from rlhf.data.reading import describe_dataset, load_datasets
from rlhf.data.records import RawDataset
from rlhf.data.splits import divide_over_phases
from rlhf.models.tokenizers import train_tokenizer
from tests.conftest import Compose
from tools.fruit_rows import FRUITS, write_rows

from .row_tables import config_of, load, pairs_of, prompts, write

SAMPLES = Path(__file__).parents[2] / "rlhf" / "data" / "samples"
PETS = {"pets": DatasetConfig(path="a")}


# ----------------------------------------------------------------------------------- saved and hub


def test_saved_dict_has_its_sides_by_name_and_as_a_hub_data_set_by_config(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset.from_list(pairs_of(name)) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path)
    hub: dict[str, Any] = {"source": Source.hub}
    train, test = ["train0:", "train1:"], ["test0:", "test1:"]
    for changes, expected in (
        ({}, (train, test)),
        (hub, (train, [])),
        (hub | {"train_split": "test", "eval_split": "train"}, (test, train)),
    ):
        found = load(tmp_path, **changes)
        assert (prompts(found.train), prompts(found.eval)) == expected
    with pytest.raises(DataError, match=r"no split 'dev'; choose train or test\."):
        load(tmp_path, source=Source.hub, eval_split="dev")


def test_hub_data_set_is_loaded_with_subset_and_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    load_dataset = Mock(
        return_value=datasets.DatasetDict(train=datasets.Dataset.from_list(pairs_of("hub")))
    )
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    dataset = load("org/pets", source=Source.hub, subset="cats", revision="v2")
    load_dataset.assert_called_once_with("org/pets", name="cats", revision="v2")
    assert (dataset.name, prompts(dataset.train)) == ("org/pets", ["hub0:", "hub1:"])
    for load_dataset.side_effect in (ConnectionError("no route"), RuntimeError("no route")):
        told = r"^org/pets: .*no route\)\. .*data=local .*save_to_disk\."
        with pytest.raises(DataError, match=told):  # the second error: of scripts
            load("org/pets", source=Source.hub)


def test_a_data_set_that_was_just_loaded_is_the_one_that_is_found_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks of a node read the cache, where the library takes the latest revision."""
    for revision in ("new", "old"):
        rows = write(tmp_path / f"{revision}.jsonl", pairs_of(revision))
        cached = tmp_path / "org___pets" / "default" / "0.0.0" / revision
        split = datasets.Dataset.from_json(str(rows), cache_dir=str(tmp_path / revision))
        shutil.copytree(Path(split.cache_files[0]["filename"]).parent, cached)
        next(cached.glob("*.arrow")).rename(cached / "pets-train.arrow")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    assert prompts(load("org/pets", source=Source.hub).train) == ["old0:", "old1:"]
    for seconds, revision in enumerate(("new", "old")):
        os.utime(cached.with_name(revision), (seconds, seconds))
    new = datasets.Dataset.from_file(str(cached.with_name("new") / "pets-train.arrow"))
    with monkeypatch.context() as online:
        online.setattr(datasets, "load_dataset", lambda *_, **__: new)
        assert prompts(load("org/pets", source=Source.hub).train) == ["new0:", "new1:"]
    assert prompts(load("org/pets", source=Source.hub).train) == ["new0:", "new1:"]


# ----------------------------------------------------------------------- several, and held-out ones


def test_list_gives_one_data_set_for_each_entry(tmp_path: Path) -> None:
    files = [str(write(tmp_path / f"{name}.jsonl", pairs_of(name))) for name in "ab"]
    held_out = [str(write(tmp_path / f"{name}.csv", pairs_of(name))) for name in "xy"]
    one, two = load_datasets(config_of(files, eval_path=held_out), seed=0)
    assert [one.name, two.name] == files
    assert [prompts(one.train), prompts(one.eval)] == [["a0:", "a1:"], ["x0:", "x1:"]]
    assert [prompts(two.train), prompts(two.eval)] == [["b0:", "b1:"], ["y0:", "y1:"]]


def test_eval_path_takes_the_held_out_files_of_a_folder_else_all(tmp_path: Path) -> None:
    file = write(tmp_path / "train.jsonl", pairs_of("train"))
    write(tmp_path / "test.jsonl", pairs_of("test"))
    assert prompts(load(file, eval_path=str(tmp_path)).eval) == ["test0:", "test1:"]
    assert prompts(load(file, eval_path=str(file)).eval) == ["train0:", "train1:"]


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        (["a", "b"], {"eval_path": "c"}, r"eval_path has 1 entries and data\.path 2: give one"),
        ([], {}, r"path=\[\]: must be"),
        ("", {}, r"path=: must be"),
        ("a", {"eval_path": {"b": 1}}, r"eval_path=\{'b': 1\}: must be"),
        ("b", {"sets": PETS}, r"path=b with data\.sets \(pets\): set only one"),
        (None, {"eval_path": "b", "sets": PETS}, r"eval_path=b with data\.sets \(pets\): set only"),
        (".", {"eval_path": "a"}, r"eval_path=a: .*already has held-out rows \(test\.jsonl\); set"),
    ],
)
def test_wrong_paths_are_refused(
    path: object, changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train", "test"):
        write(Path(f"{name}.jsonl"), pairs_of(name))
    with pytest.raises(DataError, match=rf"^data\.{message}"):
        load_datasets(config_of(path, **changes), seed=0)


# ----------------------------------------------------------------------------------- what comes out


def test_description_is_one_line_with_all_counts(tmp_path: Path) -> None:
    rows = [*pairs_of("a", 1200), {"prompt": ""}, {"prompt": "a", "chosen": ""}, {"prompt": ""}]
    file = write(tmp_path / "a.jsonl", rows)
    assert describe_dataset(load(file)) == (
        f"{file}: preference, 1,200 examples, 3 skipped (2 prompt is empty "
        f"(first: {file}, row 1201), 1 chosen is empty (first: {file}, row 1202))"
        "; reads prompt, chosen, rejected"
    )
    held_out = write(tmp_path / "b.jsonl", pairs_of("b"))
    assert "1,202 examples (2 held out), 3 skipped" in describe_dataset(
        load(file, eval_path=str(held_out))
    )
    assert describe_dataset(load(held_out)).endswith(
        ", 2 examples, 0 skipped; reads prompt, chosen, rejected"
    )


def test_description_counts_pairs_that_reverse_an_earlier_one(tmp_path: Path) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    rows = [*pairs_of("a", 3), row, row | {"chosen": "C ", "rejected": "b"}]
    dataset = load(write(tmp_path / "a.jsonl", rows))
    assert len(dataset.train) == 5
    assert "5 examples, 1 the reverse of an earlier one, 0 skipped" in describe_dataset(dataset)
    held_out = write(tmp_path / "b.jsonl", rows[-1:])
    only_one = load(write(tmp_path / "c.jsonl", rows[:-1]), eval_path=str(held_out))
    assert (
        "5 examples (1 held out), 1 the reverse of an earlier one, 0 skipped"
        in describe_dataset(only_one)
    )


# ------------------------------------------------------------------------------------- named sets


def load_sets(source: Source = Source.hub, **sets: DatasetConfig) -> list[RawDataset]:
    return load_datasets(config_of(None, source=source, sets=sets), seed=0)


def test_sets_are_loaded_in_order_with_their_names_weights_and_phases(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", pairs_of("a"))
    two = write(tmp_path / "two.jsonl", [{"q": "b", "a": "c"}])
    columns = {"prompt": "human(q)", "chosen": "a"}
    first, second = load_sets(
        Source.local,
        first=DatasetConfig(path=str(one), weight=2.0),
        second=DatasetConfig(path=str(two), columns=columns, phases=[Phase.sft]),
    )
    assert [(each.name, each.layout, each.weight, each.phases) for each in (first, second)] == [
        ("first", "preference", 2.0, None),
        ("second", "columns", 1.0, [Phase.sft]),
    ]
    assert prompts(first.train) == ["a0:", "a1:"]
    (record,) = second.train
    assert (record.prompt, record.chosen) == ("\n\nHuman: b\n\nAssistant:", " c")


def test_columns_of_every_set_are_checked_before_any_is_read() -> None:
    with pytest.raises(ConfigError, match=r"^data\.sets\.two\.columns\.prompt=q q: not a JMES"):
        load_sets(
            one=DatasetConfig(path="missing"),
            two=DatasetConfig(path="missing", columns={"prompt": "q q"}),
        )


# ---------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("language", ["english", "chinese", "japanese"])
def test_every_row_of_a_sample_is_used_and_survives_a_tokenizer(
    language: str, compose: Compose
) -> None:
    config = to_run_config(compose([f"experiment=sample_{language}"]))
    (dataset,) = load_datasets(config.data, seed=config.seed)
    assert (len(dataset.train), dataset.eval, dataset.left_out) == (24, None, {})
    assert len({record.prompt for record in dataset.train}) == 24
    tokenizer = train_tokenizer(
        (text for r in dataset.train for text in r.texts if text), vocab_size=600
    )
    for record in dataset.train:
        assert record.chosen != record.rejected
        for text in record[:3]:
            assert text
            ids = tokenizer(text).input_ids
            assert tokenizer.decode(ids) == text
        assert len(tokenizer(record.prompt).input_ids) < config.rollout.max_prompt_tokens
    parts = divide_over_phases(
        [dataset], split=config.data.split, eval_share=config.data.eval_share, seed=1
    )
    batches = (config.sft.batch_size, config.reward.batch_size, config.ppo.rollout_batch_size)
    for (part,), batch in zip(parts.values(), batches, strict=True):
        assert len(part.train) >= batch
        assert part.eval


def test_rows_of_experiment_minute_are_those_of_their_script(
    compose: Compose, tmp_path: Path
) -> None:
    write_rows(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {p.name for p in SAMPLES.glob("*.csv")}
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (SAMPLES / file.name).read_bytes()
    config = to_run_config(compose(["experiment=minute"]))
    shown, compared = (d.train for d in load_datasets(config.data, seed=config.seed))
    assert len({record.prompt for record in (*shown, *compared)}) == 3200, "no question repeats"
    right = [record.chosen.strip(" .").split()[-1] in FRUITS for record in shown]
    assert 0.2 < sum(right) / len(right) < 0.3, "PPO has to learn what demonstrations do not show"
    assert {len(r.chosen.split()) for r in compared} == {len(r.rejected.split()) for r in compared}
