"""Data of a user: rows, files, saved data sets, paths and expressions."""

import json
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import datasets
import pyarrow as pa  # type: ignore[import-untyped]
from hydra import compose
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from rlhf.config.choices import Phase, Source
from rlhf.config.freeze import to_run_config
from rlhf.config.hydra_parts import composing
from rlhf.config.schema.data import DatasetConfig
from rlhf.data.reading import describe_dataset, load_datasets
from rlhf.data.splits import blend_datasets, check_usable_examples, divide_over_phases
from rlhf.data.tokens import Limit, tokenise
from rlhf.models.tokenizers import train_tokenizer
from rlhf.options import DataConfig
from rlhf.options.ptx.corpus import load_ptx_texts
from tests.fuzz.case import Case
from tests.fuzz.mutations import VALUES, mutate
from tests.runs import ROOT

PHASES = (Phase.sft, Phase.reward, Phase.ppo)
Row = dict[str, Any]


@cache
def config() -> DataConfig:
    with composing(ROOT / "conf"):
        return to_run_config(compose("config", ["data=local", "data.path=unset"])).data


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["\n\nHuman: hi\n\nAssistant: some words"], vocab_size=300)


def use(folder: Path, **changes: Any) -> Callable[[], None]:
    """Return a function that does with the data what a run does before its first step."""
    data = replace(config(), **changes)

    def act() -> None:
        loaded = load_datasets(data, seed=1)
        for each in loaded:
            assert each.layout in describe_dataset(each)
        divided = divide_over_phases(loaded, split=data.split, eval_share=data.eval_share, seed=1)
        parts = {phase: blend_datasets(found, seed=1) for phase, found in divided.items()}
        check_usable_examples(parts, list(PHASES))
        for phase in PHASES:
            limit = Limit("max_tokens", 64)
            tokenise(parts[phase], phase, tokenizer(), limit=limit, cache_dir=folder / "cache")

    return act


def rows(draw: Random) -> list[Row]:
    """Return usable rows of a layout with pairs: of texts, of messages or of ShareGPT's."""
    layout = draw.choice(["texts", "messages", "ShareGPT"])
    found: list[Row] = []
    for n in range(24):
        ask, yes, no = f"question {n}", f"yes {n}", f"no {n}"
        turns: Row = {"prompt": ask, "chosen": yes, "rejected": no}
        if layout == "messages":
            turns = {"prompt": [{"role": "user", "content": ask}]}
            said = {"chosen": yes, "rejected": no}
            turns |= {key: [{"role": "assistant", "content": each}] for key, each in said.items()}
        elif layout == "ShareGPT":
            turns = {"conversations": [{"from": "human", "value": ask}]}
            turns |= {"chosen": {"from": "gpt", "value": yes}}
            turns |= {"rejected": {"from": "gpt", "value": no}}
        found.append(turns)
    return found


def write(path: Path, found: list[Any]) -> Path:
    """Write rows in the format of the file's ending; parquet takes what it can of them."""
    if path.suffix == ".parquet":
        try:
            table = pa.Table.from_pylist(found)
        except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
            table = pa.table({"row": [json.dumps(row) for row in found]})
        parquet.write_table(table, path)
    elif path.suffix == ".csv":
        lines = ["prompt,chosen,rejected", *(f"question {n},yes {n},no {n}" for n in range(24))]
        path.write_text("\n".join(lines) + "\n")
    else:
        texts = [json.dumps(row) for row in found]
        path.write_text("\n".join(texts) if path.suffix == ".jsonl" else f"[{', '.join(texts)}]")
    return path


def odd_value(draw: Random) -> Any:
    """Return a value that a column of text rarely has."""
    deep: Any = "bottom"
    for _ in range(draw.choice([3, 90, 400])):
        deep = [deep] if draw.random() < 0.5 else {"content": deep}
    odd: list[Any] = [deep, 10**300, float("nan"), "\ud800", " \u2028\t", "x" * 200_000]
    odd += [{"role": role, "content": "x"} for role in ("tool", "", None, 5, ["user"])]
    odd += [{"from": "bot", "value": None}, [{"role": "assistant", "content": None}]]
    return draw.choice([*odd, *VALUES])


def bad_rows(draw: Random, folder: Path) -> Case:
    """Put odd values, rows that are no objects, or other columns into a good file."""
    found: list[Any] = list(rows(draw))
    path, must_refuse = folder / f"a{draw.choice(['.jsonl', '.json', '.parquet'])}", False
    match draw.choice(["values", "values", "a row", "columns", "few"]):
        case "values":
            for _ in range(draw.choice([1, 3, 40])):
                row = draw.choice(found)
                row[draw.choice([*row, "extra", "text", "messages"])] = odd_value(draw)
        case "a row":
            found.insert(draw.randrange(len(found)), draw.choice([None, 7, "text", [], [1], True]))
            must_refuse = True
        case "columns":
            old, new = draw.choice(["chosen", "rejected"]), draw.choice(["", "a" * 999, "Chosen"])
            found = [{new if k == old else k: v for k, v in row.items()} for row in found]
            must_refuse = True
        case _:
            del found[draw.randrange(1, 4) :]
            must_refuse = True
    return Case(f"rows of {path.name}", use(folder, path=str(write(path, found))), must_refuse)


def bad_file(draw: Random, folder: Path) -> Case:
    """Damage a good file of any format, or write a text that is no table."""
    path = write(folder / f"a{draw.choice(['.jsonl', '.json', '.csv', '.parquet'])}", rows(draw))
    good = path.read_bytes()
    texts = [b'{"prompt": ' + b"9" * 5000 + b"}\n", b"[" * 60_000, b'{"a":' * 60_000, b""]
    texts += [b"\xe9" * 99, b"\n" * 999, pickle.dumps([1]), good[:20] + b"\xff\xfe" + good]
    if draw.random() < 0.5:
        path.write_bytes(draw.choice(texts))
        return Case(f"a text as {path.name}", use(folder, path=str(path)))
    what = mutate(draw, path)
    return Case(what, use(folder, path=str(path)), must_refuse=False)


def bad_saved(draw: Random, folder: Path) -> Case:
    """Damage a file of a save_to_disk folder."""
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows(draw)).save_to_disk(folder / "saved")
    files = sorted(file for file in (folder / "saved").rglob("*") if file.is_file())
    what = mutate(draw, draw.choice(files))
    source = draw.choice([Source.local, Source.hub])
    act = use(folder, path=str(folder / "saved"), source=source)
    return Case(f"saved data set, {what}", act, must_refuse=False)


def bad_path(draw: Random, folder: Path) -> Case:
    """Name nothing, or a thing that is no file, in each of the keys that take a path."""
    good, pipe = str(write(folder / "good.jsonl", rows(draw))), folder / "pipe.jsonl"
    os.mkfifo(pipe)
    names = ["~nobody/x.jsonl", "x" * 5000, "a\0b.jsonl", "\ud800.jsonl", "/proc/self/mem"]
    names += [f"{good}/below.jsonl", f"{folder}/none.jsonl", f"file://{good}", "samples:x", " "]
    path = draw.choice([*names, str(pipe)])
    changes: dict[str, Row] = {
        "path": {"path": path},
        "eval_path": {"path": good, "eval_path": path},
        "sets": {"path": None, "sets": {"mine": DatasetConfig(path=path)}},
        "list": {"path": [good, draw.choice([path, None, 5, [], {}, ""])]},
        "ptx": {"path": good, "ptx_path": path},
    }
    key = draw.choice(list(changes))

    def read_corpus() -> None:
        datasets.config.HF_HUB_OFFLINE = True  # a path that names nothing may be an id of the hub
        load_ptx_texts(replace(config(), **changes[key]), seed=1)

    act = read_corpus if key == "ptx" else use(folder, **changes[key])
    return Case(f"{key}={path[:20]!r}", act)


def bad_expression(draw: Random, folder: Path) -> Case:
    """Join words of JMESPath at random, as data.sets.NAME.columns."""
    good = write(folder / "good.jsonl", rows(draw))
    words = ["prompt", "chosen", "a[0]", "human(", ")", "pick(", ",", "`1`", "'x'", "|", ".", "@"]
    words += ["[?", "]", "&", "max_by(", "sort(", "*", "remove(prompt, '(a+)+$')", "`[", "`", "!"]
    words += ["conversation(prompt, '', '')", "join(", "to_number(", "[::0]", "[9999999999999]"]
    text = "".join(draw.choice(words) for _ in range(draw.choice([1, 2, 3, 5, 400])))
    column = draw.choice(["prompt", "chosen", "rejected", "responses", "other"])
    columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"} | {column: text}
    named = DatasetConfig(path=str(good), columns=columns)
    act = use(folder, path=None, sets={"mine": named})
    return Case(f"columns.{column}={text[:30]}", act, must_refuse=False)


DAMAGES = (bad_rows, bad_rows, bad_file, bad_file, bad_saved, bad_path, bad_expression)


def cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield hostile data without end."""
    while True:
        yield draw.choice(DAMAGES)(draw, folder)
