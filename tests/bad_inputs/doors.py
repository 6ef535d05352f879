"""The doors other than the command line: data, model folders, runs, environment, commands."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

import rlhf.export
import rlhf.report.__main__
from rlhf.base.cpu import usable_isa
from rlhf.base.errors import RlhfError
from rlhf.config.choices import Phase, Source
from rlhf.config.freeze import load_run
from rlhf.config.schema.run import RunConfig
from rlhf.data.reading import describe_data, load_datasets
from rlhf.data.splits import blend_datasets, check_usable_examples, divide_over_phases
from rlhf.jobs.sweep_command import expand_sweep
from rlhf.models.build import ModelSource, build_actor
from rlhf.models.tokenizers import load_tokenizer, train_tokenizer
from rlhf.runtime.launch_mode import launch_mode
from rlhf.runtime.rendezvous import with_started_ranks

Input = tuple[str, Callable[[], str]]
GOOD = {"prompt": "\n\nHuman: hi\n\nAssistant:", "chosen": " yes", "rejected": " no"}
LINE = json.dumps(GOOD).encode() + b"\n"


def lines(*rows: object) -> bytes:
    """JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


# Enough rows for every phase.
MANY = lines(*(GOOD | {"prompt": f"\n\nHuman: {n}\n\nAssistant:"} for n in range(60)))
FILES: dict[str, tuple[str, bytes]] = {
    "an empty file": ("a.jsonl", b""),
    "only blank lines": ("a.jsonl", b"\n\n\n"),
    "a line cut off in the middle": ("a.jsonl", LINE + LINE[:40]),
    "a line that is no JSON": ("a.jsonl", LINE + b"hello\n"),
    "single quotes": ("a.jsonl", b"{'prompt': 'a', 'chosen': 'b'}\n"),
    "a list in each line": ("a.jsonl", b"[1, 2]\n" * 3),
    "a number in each line": ("a.jsonl", b"42\n" * 3),
    "text in each line": ("a.jsonl", b'"hello"\n' * 3),
    "null in each line": ("a.jsonl", b"null\n" * 3),
    "UTF-16": ("a.jsonl", LINE.decode().encode("utf-16")),
    "Latin-1 letters": ("a.jsonl", '{"prompt": "é", "chosen": "ü"}\n'.encode("latin-1")),
    "null bytes": ("a.jsonl", LINE + b"\0" * 64),
    "a gzip file called .jsonl": ("a.jsonl", gzip.compress(LINE)),
    "damaged gzip": ("a.jsonl.gz", gzip.compress(LINE * 9)[:40]),
    "a pickle called .jsonl": ("a.jsonl", pickle.dumps([GOOD])),
    "a picture": ("a.png", b"\x89PNG\r\n\x1a\n"),
    "plain text": ("a.txt", b"hello\n"),
    "an unknown ending": ("a.xyz", LINE),
    "no ending": ("data", LINE),
    "unknown columns": ("a.jsonl", lines({"question": "a", "reply": "b"})),
    "a prompt without answers": ("a.jsonl", lines({"prompt": "a"}) * 20),
    "chosen is a number": ("a.jsonl", lines(GOOD | {"chosen": 7}) * 3),
    "chosen is true": ("a.jsonl", lines(GOOD | {"chosen": True}) * 3),
    "chosen is an object": ("a.jsonl", lines(GOOD | {"chosen": {"a": 1}}) * 3),
    "chosen is a list of numbers": ("a.jsonl", lines(GOOD | {"chosen": [1, 2]}) * 3),
    "rejected is a list of texts": ("a.jsonl", lines(GOOD | {"rejected": ["a", "b"]}) * 3),
    "every prompt is null": ("a.jsonl", lines(GOOD | {"prompt": None}) * 3),
    "every prompt is empty": ("a.jsonl", lines(GOOD | {"prompt": "  "}) * 3),
    "one prompt is null": ("a.jsonl", MANY + lines(GOOD | {"prompt": None})),
    "one answer is empty": ("a.jsonl", MANY + lines(GOOD | {"chosen": ""})),
    "chosen equals rejected": ("a.jsonl", MANY + lines(GOOD | {"rejected": " yes"})),
    "one row has other columns": ("a.jsonl", MANY + lines({"text": "a"})),
    "a column changes its type": ("a.jsonl", LINE + lines(GOOD | {"chosen": ["a"]})),
    "messages without a role": ("a.jsonl", lines({"messages": [{"content": "a"}]}) * 3),
    "messages with an unknown role": (
        "a.jsonl",
        lines({"messages": [{"role": "alien", "content": "a"}]}) * 3,
    ),
    "messages with a null content": (
        "a.jsonl",
        lines({"messages": [{"role": "user", "content": None}]}) * 3,
    ),
    "messages without an answer": (
        "a.jsonl",
        lines({"messages": [{"role": "user", "content": "a"}]}) * 3,
    ),
    "empty lists of messages": ("a.jsonl", lines({"messages": []}) * 3),
    "too few rows": ("a.jsonl", LINE),
    "a truncated JSON array": ("a.json", b'[{"prompt": "a"},'),
    "a JSON object": ("a.json", b'{"prompt": "a"}'),
    "an empty JSON array": ("a.json", b"[]"),
    "an array of numbers": ("a.json", b"[1, 2, 3]"),
    "a number that JSON does not have": ("a.jsonl", b'{"prompt": NaN, "chosen": "b"}\n'),
    "a very deep list": ("a.jsonl", b"[" * 100_000 + b"\n"),
    "an empty csv": ("a.csv", b""),
    "a csv with a header only": ("a.csv", b"prompt,chosen,rejected\n"),
    "a csv with ragged rows": ("a.csv", b"prompt,chosen\na,b\nc,d,e,f\n"),
    "a csv with an open quote": ("a.csv", b'prompt,chosen\n"a,b\n'),
    "a csv with unknown columns": ("a.csv", b"x,y\n1,2\n"),
    "an empty parquet file": ("a.parquet", b""),
    "a damaged parquet file": ("a.parquet", b"PAR1" + b"\0" * 50 + b"PAR1"),
    "a lone surrogate": ("a.jsonl", b'{"prompt": "\\ud800", "chosen": "b", "rejected": "c"}\n'),
}


def data_inputs(config: RunConfig, folder: Path) -> Iterator[Input]:
    """Yield data files and paths."""

    def read(path: Path, eval_path: Path | None = None) -> str:
        held_out = None if eval_path is None else str(eval_path)
        data = replace(config.data, source=Source.local, path=str(path), eval_path=held_out)
        datasets = load_datasets(data, seed=1)
        divided = divide_over_phases(datasets, split=data.split, eval_share=data.eval_share, seed=1)
        parts = {phase: blend_datasets(found, seed=1) for phase, found in divided.items()}
        check_usable_examples(parts, [Phase.sft, Phase.reward, Phase.ppo])
        told = "; ".join(map(describe_data, datasets))
        return told if "0 skipped" not in told else ""

    for number, (label, (name, content)) in enumerate(FILES.items()):
        path = folder / f"{number}" / name
        path.parent.mkdir()
        path.write_bytes(content)
        yield label, lambda path=path: read(path)
    (folder / "empty").mkdir()
    good = folder / "good.jsonl"
    good.write_bytes(MANY)
    yield "a file that does not exist", lambda: read(folder / "missing.jsonl")
    yield "an empty folder", lambda: read(folder / "empty")
    yield "a device", lambda: read(Path("/dev/null"))
    yield "held-out file does not exist", lambda: read(good, folder / "missing.jsonl")
    yield "held-out file is empty", lambda: read(good, folder / "0" / "a.jsonl")


CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 300,
}


def model_inputs(folder: Path) -> Iterator[Input]:
    """Yield model and tokenizer folders."""
    tokenizer = train_tokenizer(["some text"], vocab_size=300)

    def model(name: str, files: Mapping[str, bytes | str]) -> Input:
        place = folder / name.replace(" ", "_")
        place.mkdir()
        for file, content in files.items():
            (place / file).write_bytes(content.encode() if isinstance(content, str) else content)

        def build() -> str:
            build_actor(ModelSource(key="model.path", path=str(place)), tokenizer, seed=1)
            return ""

        return f"model: {name}", build

    config = json.dumps(CONFIG)
    header = json.dumps({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}).encode()
    cut_off = struct.pack("<Q", len(header)) + header + b"\0" * 8
    weights = "model.safetensors"
    yield model("empty folder", {})
    yield model("weights are missing", {"config.json": config})
    yield model("config is missing", {weights: cut_off})
    yield model("config is no JSON", {"config.json": "{", weights: cut_off})
    yield model("config is a list", {"config.json": "[]", weights: cut_off})
    yield model("unknown model type", {"config.json": '{"model_type": "x"}', weights: cut_off})
    yield model("no model type", {"config.json": "{}", weights: cut_off})
    yield model("an image model", {"config.json": '{"model_type": "vit"}', weights: cut_off})
    yield model("pickled weights", {"config.json": config, "pytorch_model.bin": pickle.dumps({})})
    yield model("weights are text", {"config.json": config, weights: "hello"})
    yield model("weights are empty", {"config.json": config, weights: ""})
    yield model("weights are cut off", {"config.json": config, weights: cut_off})
    yield model("a huge header", {"config.json": config, weights: struct.pack("<Q", 2**60)})
    yield model("negative width", {"config.json": json.dumps(CONFIG | {"hidden_size": -8})})
    yield model(
        "index names a missing shard",
        {"config.json": config, "model.safetensors.index.json": '{"weight_map": {"a": "b"}}'},
    )
    yield model("adapter of another kind", {"adapter_config.json": '{"peft_type": "IA3"}'})
    yield model("adapter without a base", {"adapter_config.json": '{"peft_type": "LORA"}'})
    yield model("adapter config is no JSON", {"adapter_config.json": "{"})

    def tokens(name: str, files: Mapping[str, str]) -> Input:
        place = folder / f"tokenizer_{name.replace(' ', '_')}"
        place.mkdir()
        for file, content in files.items():
            (place / file).write_text(content)

        def load() -> str:
            load_tokenizer(place, key="model.tokenizer")
            return ""

        return f"tokenizer: {name}", load

    tokenizer.save_pretrained(folder / "saved")
    whole = (folder / "saved" / "tokenizer.json").read_text()
    settings = json.loads((folder / "saved" / "tokenizer_config.json").read_text())
    no_end = json.dumps({k: v for k, v in settings.items() if k != "eos_token"})
    yield tokens("empty folder", {})
    yield tokens("no JSON", {"tokenizer.json": "{", "tokenizer_config.json": no_end})
    yield tokens("cut off", {"tokenizer.json": whole[:500], "tokenizer_config.json": no_end})
    yield tokens("no end token", {"tokenizer.json": whole, "tokenizer_config.json": no_end})
    yield tokens("settings only", {"tokenizer_config.json": json.dumps(settings)})
    yield tokens("settings are a list", {"tokenizer.json": whole, "tokenizer_config.json": "[]"})


def run_inputs(folder: Path) -> Iterator[Input]:
    """Yield run directories, and commands that read them."""

    def run(label: str, content: bytes | None) -> Path:
        place = folder / label.replace(" ", "_")
        place.mkdir()
        if content is not None:
            (place / "config.yaml").write_bytes(content)
        return place

    def load(place: Path) -> str:
        load_run(place)
        return ""

    def command(main: Callable[[Sequence[str]], int], *words: object) -> str:
        told = StringIO()
        with redirect_stderr(told):
            code = main([str(word) for word in words])
        if code != 2:
            return ""
        raise RlhfError(told.getvalue().strip().removeprefix("error: "))

    broken = {
        "no run": None,
        "empty config": b"",
        "config is a list": b"[1]",
        "config is no YAML": b"a: [",
        "config is binary": b"\xff\xfe\0",
        "unknown key": b"nonsense: 1\n",
        "missing keys": b"seed: 1\n",
        "python object": b"!!python/object/apply:os.system ['true']\n",
    }
    places = {label: run(label, content) for label, content in broken.items()}
    for label, place in places.items():
        yield f"resume: {label}", lambda place=place: load(place)
    yield "resume: a folder that does not exist", lambda: load(folder / "missing")
    report, export = rlhf.report.__main__.main, rlhf.export.main
    for label in ("no run", "empty config", "config is no YAML"):
        place = places[label]
        yield f"rlhf.report: {label}", lambda place=place: command(report, place)
    yield "rlhf.report: missing folder", lambda: command(report, folder / "missing")
    yield "rlhf.export: missing folder", lambda: command(export, folder / "missing")
    yield "rlhf.export: unknown key", lambda: command(export, places["unknown key"])
    yield "rlhf.export: target exists", lambda: command(export, folder, "--out", places["no run"])
    for name in ("unknown", "../../etc/passwd", ""):
        words = ["-m", f"sweep={name}"]
        yield (
            f"sweep={name}",
            lambda words=words: " ".join(expand_sweep(words, folder)) and "",
        )


VARIABLES: list[dict[str, str]] = [
    {"RLHF_MAX_CPU_ISA": "mmx"},
    {"LOCAL_RANK": "0", "RANK": "a", "WORLD_SIZE": "2"},
    {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "two"},
    {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "0"},
    {"LOCAL_RANK": "0", "RANK": "5", "WORLD_SIZE": "2"},
    {"LOCAL_RANK": "0", "RANK": "-1", "WORLD_SIZE": "2"},
    {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"},
    {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "x"},
    {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "7"},
    {"SLURM_PROCID": "a", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "x", "SLURM_JOB_NODELIST": "n[1-2]"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "z", "SLURM_JOB_NODELIST": "a"},
]


def environment_inputs(
    config: RunConfig, set_environment: Callable[[Mapping[str, str]], None]
) -> Iterator[Input]:
    """Yield values of environment variables."""

    def read(variables: Mapping[str, str]) -> str:
        set_environment(variables)
        usable_isa()
        if "LOCAL_RANK" in variables:
            with_started_ranks(config)
        launch_mode(replace(config, hardware=two_nodes), variables)
        return ""

    two_nodes = replace(config.hardware, nodes=2)

    for variables in VARIABLES:
        label = " ".join(f"{name}={value}" for name, value in variables.items())
        yield label, lambda variables=variables: read(variables)
