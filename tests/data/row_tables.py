"""Tables of rows, in YAML, and of the records that are made of them."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa  # type: ignore[import-untyped]
import yaml
from pyarrow import parquet

from rlhf.config.choices import Source, Template
from rlhf.config.schema.data import DatasetConfig
from rlhf.data.reading import load_datasets
from rlhf.data.records import RawDataset, Record
from rlhf.options import DataConfig
from tests.runs import ROOT

Rows = list[dict[str, Any]]
NUMBERS = range(6)
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "d": "developer"}
SHAREGPT = {"u": "human", "a": "gpt", "b": "bing", "f": "function_call", "o": "observation"}


def said(*turns: str) -> Rows:
    """Return messages whose roles are the letters in front of the texts."""
    return [{"role": ROLES[turn[0]], "content": turn[1:]} for turn in turns]


def shared(*turns: str) -> Rows:
    """Return ShareGPT's messages."""
    return [{"from": SHAREGPT[turn[0]], "value": turn[1:]} for turn in turns]


def asked(*turns: str) -> str:
    """Return a prompt of plain turns, whose speakers are the letters in front of the texts."""
    names = {"s": "System", "u": "Human", "a": "Assistant", "t": "Tool"}
    return "".join(f"\n\n{names[turn[0]]}: {turn[1:]}" for turn in turns) + "\n\nAssistant:"


def config_of(path: object, **changes: Any) -> DataConfig:
    settings = yaml.safe_load((ROOT / "conf/base/data.yaml").read_text()) | {
        "source": Source.local,
        "path": str(path) if isinstance(path, Path) else path,
        "clean": False,
        "deduplicate": False,
        "template": Template.plain,
        "cache_dir": "unused",
    }
    return DataConfig(**settings | changes)


def write(path: Path, rows: Rows) -> Path:
    """Write rows in the form of the file's name; a name without an ending is a saved folder."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", encoding="utf-8", newline="") as stream:
            mark = "\t" if path.suffix == ".tsv" else ","
            writer = csv.DictWriter(stream, rows[0].keys(), delimiter=mark)
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps({"data": rows} if path.stem == "one" else rows, indent=1))
    elif not path.suffix:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def pairs_of(name: str, count: int = 2) -> Rows:
    return [{"prompt": f"{name}{n}:", "chosen": " yes", "rejected": " no"} for n in range(count)]


def prompts(records: Iterable[Record] | None) -> list[str | None]:
    return [record.prompt for record in records or []]


def load(path: object, **changes: Any) -> RawDataset:
    (dataset,) = load_datasets(config_of(path, **changes), seed=0)
    return dataset


def read(file: Path, rows: Rows, **entry: Any) -> RawDataset:
    """Write rows to a file, and read it as a named set."""
    return load(None, sets={"mine": DatasetConfig(path=str(write(file, rows)), **entry)})


class Each(list[Any]):
    """A value for each number."""


def read_tables(name: str) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield the documents of a file; layouts.yaml describes its form."""

    class Loader(yaml.SafeLoader):
        """Knows the tags of layouts.yaml."""

    def add_tag(tag: str, build: Callable[[list[Any]], Any]) -> None:
        Loader.add_constructor(tag, lambda self, node: build(self.construct_sequence(node, True)))

    add_tag("!each", Each)
    add_tag("!said", lambda turns: said(*turns))
    add_tag("!shared", lambda turns: shared(*turns))
    return yaml.load_all(Path(__file__).with_name(name).read_text(), Loader)


def fill(value: Any, number: int) -> Any:
    """Return a value of the tables for one number."""
    match value:
        case str():
            return value.replace("$n", str(number))
        case dict():
            return {key: fill(each, number) for key, each in value.items()}
        case Each():
            return fill(value[number], number)
        case list():
            return [fill(each, number) for each in value]
    return value


def rows_of(case: dict[str, Any], numbers: Sequence[int] = NUMBERS) -> Rows:
    """Return the rows of a case, of all numbers."""
    rows = case.get("rows") or [case["row"]]
    return [fill(row, number) for number in numbers for row in rows]


def records_of(case: dict[str, Any], numbers: Sequence[int] = NUMBERS) -> list[Record]:
    """Return the records that are made of the rows."""
    found = []
    for number in numbers:
        if number not in case.get("none_of", ()):
            found += fill(case.get("records") or [case["record"]], number)
    for record in found:
        if isinstance(turns := record.get("prompt"), list):
            record["prompt"] = asked(*turns)
        for side in {"chosen", "rejected"} & {key for key, text in record.items() if text}:
            record[side] = f" {record[side]}"
    return [Record(**record) for record in found]
