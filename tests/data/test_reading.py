"""Whatever holds the rows, the same records come out; whatever is wrong is said with its place."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pytest

from rlhf.base.errors import ConfigError, DataError
from rlhf.config.choices import Phase, Source
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.data import DatasetConfig
from rlhf.data.reading import describe_dataset, load_datasets
from rlhf.data.records import RawDataset, Record
from rlhf.data.splits import divide_over_phases
from rlhf.models.tokenizers import train_tokenizer
from tests.conftest import Compose

from .row_tables import Rows, config_of, write

HH = Path(__file__).parents[3] / "shared" / "data" / "hh_harmless_dev.jsonl"


def rows_of(name: str, count: int = 2) -> Rows:
    return [{"prompt": f"{name}{n}:", "chosen": " yes", "rejected": " no"} for n in range(count)]


def prompts(records: Iterable[Record] | None) -> list[str | None]:
    return [record.prompt for record in records or []]


def as_texts(dataset: RawDataset) -> list[Record]:
    """Return the training records without their messages and places."""
    return [record._replace(messages=None, place=None) for record in dataset.train]


def load(path: object, **changes: Any) -> RawDataset:
    (dataset,) = load_datasets(config_of(path, **changes), seed=0)
    return dataset


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".JSONL"])
def test_file_formats_give_the_same_records(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"prompt": "Q: ä\u2028\n", "chosen": ' "a", b', "rejected": "c\r\nd"},
        {"prompt": "Q", "chosen": "a", "rejected": None},
        {"prompt": None, "chosen": "a", "rejected": "b"},
    ]
    dataset = load(write(tmp_path / f"data{suffix}", rows))
    assert as_texts(dataset) == [
        Record(prompt="Q: ä\u2028\n", chosen=' "a", b', rejected="c\r\nd"),
        Record(prompt="Q", chosen=" a"),
    ]
    assert dataset.eval is None
    assert dataset.layout == "preference"
    assert dataset.left_out == {"prompt is null": 1}
    assert dataset.name == str(tmp_path / f"data{suffix}")


ROW, LONG = '{"prompt": "a"}', "9" * 5000
TURNS = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"[{ROW}, {ROW}]", 2),
        (f'{{"data": [{ROW}, {ROW}]}}', 2),
        (f"\ufeff\n{ROW}\r\n{ROW}", 2),
        (ROW, 1),
        (TURNS, 1),  # the only key holds a list, and is a column
        (f"{TURNS}\n{TURNS}", 2),
        ('{"prompt": "a\u2028b"}\n{"prompt": "c\x85"}', 2),  # ends of lines elsewhere, not in JSON
    ],
)
def test_shapes_of_json(tmp_path: Path, text: str, count: int) -> None:
    file = tmp_path / "data.json"
    file.write_text(text, encoding="utf-8")
    assert len(load(file).train) == count


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", f"{ROW}\n\n{{'x'\n", r"a\.jsonl, row 3: not JSON: .* at character 2\.$"),
        ("a.jsonl", f"{ROW}\n[1]\n", r"a\.jsonl, row 2: of type list; a row must be an object\."),
        ("a.jsonl", f'{ROW}\n{{"prompt": 5}}', r"a\.jsonl, row 2: column 'prompt' .* type int;"),
        ("a.jsonl", "", r"a\.jsonl: empty; must have at least one row\.$"),
        ("a.jsonl", '{"q": 1}', r"a\.jsonl: no known layout has the columns q\.\n.*human\(QUES"),
        ("a.jsonl", '{"prompt": ""}', r"a\.jsonl: no row can be used: 1 skipped \(1 prompt is em"),
        ("a.json", "", r"a\.json: empty"),
        ("a.jsonl", '{"a": 1\n', r"a\.jsonl, row 1: not JSON: .* at character 8\.$"),
        ("a.json", "[{]", r"a\.json: not JSON: .* at line 1, character 3\.$"),
        ("a.json", f"[{ROW}, 7]", r"a\.json, row 2: of type int; a row must be an object"),
        ("a.json", f"{ROW}\n{{\n", r"a\.json, row 2: not JSON"),
        ("a.json", '{"q": "a"}', r"a\.json: no known layout has the columns q\.\n.*'human\(q\)'"),
        ("a.json", '"prompt"', r"a\.json, row 1: of type str; a row must be an object"),
        ("a.csv", "", r"a\.csv: empty"),
        ("a.csv", "prompt,x\na,b\n\nc\n", r"a\.csv, row 2: 1 fields for 2 columns \(prompt, x\)"),
        ("a.csv", "prompt,prompt\na,b\n", r"a\.csv: the header names a column twice: prompt, pro"),
        ("a.csv", 'prompt\na\n"b', r"a\.csv, row 2: unexpected end of data \(texts of over 131072"),
        ("a.jsonl", f'{ROW}\n{{"text": {LONG}}}\n', r"a.jsonl, row 2: .*5000 digits"),
        ("a.json", f'[{{"text": {LONG}}}]', r"a.json: .*5000 digits"),
        ("a.jsonl", '{"text": "a", "text": "b"}\n', r"a.jsonl, row 1: .*'text' twice"),
        ("a.json", '[{"text": "a", "n": {"x": 1, "x": 2}}]', r"a.json: .*'x' twice"),
        ("a.csv", "prompt;chosen\na;b;c\n", r"3 fields for 2 columns \(prompt, chosen\).* by ';'"),
        ("a.csv", "prompt\tchosen\na\tb\tc\n", r"row 1: 3 fields for 2 columns .* by '\\t': put"),
        ("a.parquet", "prompt", r"a\.parquet: not a parquet file \("),
        (
            "a.txt",
            "a",
            r"a\.txt: no file that can be read; supported: \.jsonl, \.json, \.csv, \.tsv, \.pa",
        ),
    ],
)
def test_malformed_file_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", ROW), ("a.json", ROW), ("a.csv", "prompt\na\n")]
)
def test_byte_order_mark_is_no_text(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(f"\ufeff{text}", encoding="utf-8")
    assert prompts(load(tmp_path / name).train) == ["a"]


def test_rows_of_parquet_are_numbered_from_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.parquet, row 1: column 'prompt'"):
        load(write(tmp_path / "a.parquet", [{"prompt": 5}]))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none: no such file or folder\. .* needs data=hub"):
        load(tmp_path / "none")


# ----------------------------------------------------------------------------------------- folders


def test_folder_is_read_by_name_and_its_held_out_files_are_known(tmp_path: Path) -> None:
    train = ("train-b.jsonl", "train-a.csv", "more.json")
    for name in (*train, "Test.parquet", "validation.json", "eval_1.csv"):
        write(tmp_path / name, rows_of(name.partition(".")[0], 1))
    (tmp_path / "README.md").write_text("Not data.")
    dataset = load(tmp_path)
    assert prompts(dataset.train) == ["more0:", "train-a0:", "train-b0:"]
    assert prompts(dataset.eval) == ["Test0:", "eval_10:", "validation0:"]


@pytest.mark.parametrize("names", [["a", "b"], ["test-a", "test-b"]])
def test_folder_without_sides_is_all_for_training(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        write(tmp_path / f"{name}.jsonl", rows_of(name, 1))
    dataset = load(tmp_path)
    assert prompts(dataset.train) == [f"{name}0:" for name in names]
    assert dataset.eval is None


def saved_dict(folder: Path) -> Path:
    splits = {name: datasets.Dataset.from_list(rows_of(name)) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(folder)
    return folder


@pytest.mark.parametrize("source", [Source.local, Source.hub])
def test_saved_dataset_is_read(tmp_path: Path, source: Source) -> None:
    datasets.Dataset.from_list(rows_of("a")).save_to_disk(tmp_path)
    dataset = load(tmp_path, source=source)
    assert prompts(dataset.train) == ["a0:", "a1:"]
    assert dataset.eval is None


def test_saved_dict_has_its_sides_by_name(tmp_path: Path) -> None:
    dataset = load(saved_dict(tmp_path))
    assert prompts(dataset.train) == ["train0:", "train1:"]
    assert prompts(dataset.eval) == ["test0:", "test1:"]


def test_saved_dict_as_hub_data_set_has_its_sides_by_config(tmp_path: Path) -> None:
    saved_dict(tmp_path)
    assert load(tmp_path, source=Source.hub).eval is None
    dataset = load(tmp_path, source=Source.hub, train_split="test", eval_split="train")
    assert prompts(dataset.train) == ["test0:", "test1:"]
    assert prompts(dataset.eval) == ["train0:", "train1:"]
    with pytest.raises(DataError, match=r"no split 'dev'; choose train or test\."):
        load(tmp_path, source=Source.hub, eval_split="dev")


def test_broken_saved_data_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DataError, match=r"not a readable save_to_disk folder \("):
        load(tmp_path)


# --------------------------------------------------------------------------------------------- hub


def test_hub_data_set_is_loaded_with_subset_and_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(*args: object, **kwargs: object) -> datasets.DatasetDict:
        calls.append((args, kwargs))
        return datasets.DatasetDict(train=datasets.Dataset.from_list(rows_of("hub")))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    dataset = load("org/pets", source=Source.hub, subset="cats", revision="v2")
    assert calls == [(("org/pets",), {"name": "cats", "revision": "v2"})]
    assert dataset.name == "org/pets"
    assert prompts(dataset.train) == ["hub0:", "hub1:"]


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("no route"),
        RuntimeError("no route"),  # data sets that are scripts
    ],
)
def test_hub_out_of_reach_is_refused(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_dataset(*args: object, **kwargs: object) -> datasets.DatasetDict:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"^org/pets: .*no route\)\. .*data=local .*save_to_disk\."):
        load("org/pets", source=Source.hub)


# ----------------------------------------------------------------------- several, and held-out ones


def test_list_gives_one_data_set_for_each_entry(tmp_path: Path) -> None:
    files = [str(write(tmp_path / f"{name}.jsonl", rows_of(name))) for name in "ab"]
    held_out = [str(write(tmp_path / f"{name}.csv", rows_of(name))) for name in "xy"]
    one, two = load_datasets(config_of(files, eval_path=held_out), seed=0)
    assert [one.name, two.name] == files
    assert prompts(one.train) == ["a0:", "a1:"]
    assert prompts(one.eval) == ["x0:", "x1:"]
    assert prompts(two.train) == ["b0:", "b1:"]
    assert prompts(two.eval) == ["y0:", "y1:"]


def test_eval_path_takes_the_held_out_files_of_a_folder_else_all(tmp_path: Path) -> None:
    file = write(tmp_path / "train.jsonl", rows_of("train"))
    write(tmp_path / "test.jsonl", rows_of("test"))
    assert prompts(load(file, eval_path=str(tmp_path)).eval) == ["test0:", "test1:"]
    assert prompts(load(file, eval_path=str(file)).eval) == ["train0:", "train1:"]


def test_two_kinds_of_held_out_rows_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "train.jsonl", rows_of("train"))
    write(tmp_path / "test.jsonl", rows_of("test"))
    with pytest.raises(
        DataError, match=r"eval_path=.* already has held-out rows \(.*test\.jsonl\); set"
    ):
        load(tmp_path, eval_path=str(file))


@pytest.mark.parametrize(
    ("path", "eval_path", "message"),
    [
        (
            ["a", "b"],
            "c",
            r"data\.eval_path has 1 entries and data\.path 2: give one entry for each",
        ),
        ([], None, r"data\.path=\[\]: must be"),
        ("", None, r"data\.path=: must be"),
        ("a", {"b": 1}, r"data\.eval_path=\{'b': 1\}: must be"),
    ],
)
def test_wrong_paths_are_refused(path: object, eval_path: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_datasets(config_of(path, eval_path=eval_path), seed=0)


# ----------------------------------------------------------------------------------- what comes out


def test_description_is_one_line_with_all_counts(tmp_path: Path) -> None:
    rows = [*rows_of("a", 1200), {"prompt": ""}, {"prompt": "a", "chosen": ""}, {"prompt": ""}]
    file = write(tmp_path / "a.jsonl", rows)
    assert describe_dataset(load(file)) == (
        f"{file}: preference, 1,200 examples, 3 skipped (2 prompt is empty "
        f"(first: {file}, row 1201), 1 chosen is empty (first: {file}, row 1202))"
        "; reads prompt, chosen, rejected"
    )
    held_out = write(tmp_path / "b.jsonl", rows_of("b"))
    assert "1,202 examples (2 held out), 3 skipped" in describe_dataset(
        load(file, eval_path=str(held_out))
    )
    assert describe_dataset(load(held_out)).endswith(
        ", 2 examples, 0 skipped; reads prompt, chosen, rejected"
    )


def test_description_counts_pairs_that_reverse_an_earlier_one(tmp_path: Path) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    rows = [*rows_of("a", 3), row, row | {"chosen": "C ", "rejected": "b"}]
    dataset = load(write(tmp_path / "a.jsonl", rows))
    assert len(dataset.train) == 5
    assert "5 examples, 1 the reverse of an earlier one, 0 skipped" in describe_dataset(dataset)
    held_out = write(tmp_path / "b.jsonl", rows[-1:])
    only_one = load(write(tmp_path / "c.jsonl", rows[:-1]), eval_path=str(held_out))
    assert (
        "5 examples (1 held out), 1 the reverse of an earlier one, 0 skipped"
        in describe_dataset(only_one)
    )


@pytest.mark.skipif(not HH.exists(), reason=f"{HH} is not on this machine")
def test_real_preferences_are_all_used_or_counted() -> None:
    dataset = load(HH)
    assert dataset.layout == "implicit-prompt preference"
    assert len(dataset.train) + dataset.left_out.total() == 1500
    assert dataset.left_out.total() < 15
    for record in dataset.train:
        assert record.prompt is not None
        assert record.prompt.endswith("\n\nAssistant:")
        assert record.chosen != record.rejected


# ------------------------------------------------------------------------------------- named sets


def load_sets(source: Source = Source.hub, **sets: DatasetConfig) -> list[RawDataset]:
    return load_datasets(config_of(None, source=source, sets=sets), seed=0)


def test_sets_are_loaded_in_order_with_their_names_weights_and_phases(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", rows_of("a"))
    two = write(tmp_path / "two.jsonl", [{"q": "b", "a": "c"}])
    columns = {"prompt": "human(q)", "chosen": "a"}
    first, second = load_sets(
        Source.local,
        first=DatasetConfig(path=str(one), weight=2.0),
        second=DatasetConfig(path=str(two), columns=columns, phases=[Phase.sft]),
    )
    assert (first.name, first.layout, first.weight, first.phases) == (
        "first", "preference", 2.0, None
    )  # fmt: skip
    assert prompts(first.train) == ["a0:", "a1:"]
    assert (second.name, second.layout, second.weight) == ("second", "columns", 1.0)
    assert second.phases == [Phase.sft]
    assert as_texts(second) == [Record(prompt="\n\nHuman: b\n\nAssistant:", chosen=" c")]


def test_copy_of_a_hub_set_has_its_splits_by_the_names_of_its_files(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00002.parquet", rows_of("a", 1))
    write(tmp_path / "train-00001-of-00002.parquet", rows_of("b", 1))
    write(tmp_path / "dev.jsonl", rows_of("c", 1))
    (dataset,) = load_sets(pets=DatasetConfig(path=str(tmp_path), eval_split="dev"))
    assert prompts(dataset.train) == ["a0:", "b0:"]
    assert prompts(dataset.eval) == ["c0:"]
    with pytest.raises(DataError, match=r"no split 'test'; choose dev or train\."):
        load_sets(pets=DatasetConfig(path=str(tmp_path), eval_split="test"))


@pytest.mark.parametrize("key", ["path", "eval_path"])
def test_path_beside_sets_is_refused(key: str) -> None:
    config = config_of(None, sets={"pets": DatasetConfig(path="a")})
    setattr(config, key, "b.jsonl")
    with pytest.raises(
        DataError, match=rf"^data\.{key}=b\.jsonl with data\.sets \(pets\): set only one"
    ):
        load_datasets(config, seed=0)


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
    config = to_run_config(compose([f"data=sample_{language}"]))
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
    for (part,) in parts.values():
        assert len(part.train) >= 4
        assert part.eval


def test_unknown_sample_is_refused() -> None:
    with pytest.raises(DataError, match=r"^samples:latin: no such sample; choose samples:chinese"):
        load("samples:latin")
