"""Seconds and memory until models are there and saved, and rows per second of tokenising.

    python benchmarks/loading.py [--shape tiny opt125m] [--sharded_shape llama60m]
        [--sharded_dtypes bf16 fp32] [--rounds 3]

A policy's folder is loaded by transformers' own ``from_pretrained``, and as this project loads it
(``build_actor``: checks, special tokens, dropout); ``RLHFEngine`` makes the four models and two
optimisers of PPO ready. Each is a new process that loads twice: the first time shows the memory,
the second, with imports done and the files in the page cache, the seconds. Two ranks load and save
a frozen model at stage 1, where each has all of it, and under ZeRO-3; their peaks are of private
memory, above what there was before, and in copies of the whole model.
Tokenising is that of the synthetic data for each phase, as a run does it, written to its cache.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Samples, Way, finish, medians, parser, peak_gb, start, table, take_turns
from loading_ranks import make_half, run_ranks
from shapes import SHAPES, Work, make_models, run_config

LOADERS = ("from_pretrained", "build_actor", "RLHFEngine")
VOCABULARY = 2048
LIMIT = 256  # tokens of an example; none of the synthetic ones is longer
MICRO_RECORDS, RECORDS = 200, 20_000
SOURCES, DTYPES, ZERO = ("stored", "random"), ("bf16", "fp32"), ("stage1", "stage3")


def by_transformers(folder: Path, device: str) -> Callable[[], Any]:
    """transformers' own way."""
    from transformers import AutoModelForCausalLM

    return lambda: AutoModelForCausalLM.from_pretrained(folder / "policy").to(device)


def by_build_actor(folder: Path, device: str) -> Callable[[], Any]:
    """This project's way."""
    from rlhf.models.build import build_actor
    from rlhf.models.sources import ModelSource
    from rlhf.models.tokenizers import load_tokenizer

    source = ModelSource(key="model.path", path=str(folder / "policy"))
    tokenizer = load_tokenizer(folder / "policy", key="model.path")
    return lambda: build_actor(source, tokenizer, seed=1).to(device)


def by_engine(folder: Path, device: str) -> Callable[[], Any]:
    """All models and optimisers of PPO."""
    from rlhf import RLHFEngine
    from rlhf.engine.devices import current_ranks

    config = run_config(folder, Work(), [f"hardware.device={device}"])
    ranks = current_ranks(config.hardware.device)  # imports DeepSpeed
    return lambda: RLHFEngine(config, ranks)


MAKERS = {
    "from_pretrained": by_transformers,
    "build_actor": by_build_actor,
    "RLHFEngine": by_engine,
}


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What the task asks for: the seconds of one loading, or the rates of tokenising."""
    if task["way"] == "tokenise":
        return tokenising(task["records"])
    if task["way"] == "ranks":
        return two_ranks(task)
    import torch

    device = torch.device(task["device"])
    load = MAKERS[task["way"]](Path(task["folder"]), task["device"])
    before = peak_gb(device)
    load()
    peak = peak_gb(device)
    started = time.perf_counter()
    load()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "peak_gb": peak, "added_gb": peak - before}


def tokenising(count: int) -> dict[str, float]:
    """Rows per second of each phase: made anew, and read from the cache."""
    from rlhf.config.choices import Phase
    from rlhf.data.splits import PhaseData
    from rlhf.data.synthetic_pairs import generate_records
    from rlhf.data.tokens import Limit, tokenise
    from rlhf.models.tokenizers import train_tokenizer

    records = generate_records(count, seed=1)
    part = PhaseData(records, records[:1])
    texts = [f"{record.prompt}{record.chosen}" for record in records]
    tokenizer = train_tokenizer(texts, vocab_size=VOCABULARY)
    limit = Limit("max_tokens", LIMIT)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for phase in (Phase.sft, Phase.reward, Phase.ppo):
            for name in (phase.value, f"{phase.value}, cached"):
                started = time.perf_counter()
                tokenise(part, phase, tokenizer, limit=limit, cache_dir=Path(folder))
                found[name] = count / (time.perf_counter() - started)
    return found


def two_ranks(task: dict[str, Any]) -> dict[str, float]:
    """The slower rank's seconds; peaks of the first and of the other, in copies of the model."""
    found = run_ranks(task)
    whole = found[0]["whole"]
    return {
        f"{part}_seconds": max(rank[part]["seconds"] for rank in found)
        for part in ("loading", "saving")
    } | {
        f"{part}_peak_{number}": rank[part]["peak"] / whole
        for part in ("loading", "saving")
        for number, rank in enumerate(found)
    }


def sharded_rows(shape: str, dtypes: list[str], rounds: int) -> list[dict[str, Any]]:
    """Figures of two ranks: every source of weights, each precision and stage."""
    with tempfile.TemporaryDirectory() as folder:
        make_half(Path(folder), shape)
        ways = {
            f"{source}, {dtype}, {zero}": Way(
                script=Path(__file__),
                task={
                    "way": "ranks",
                    "folder": folder,
                    "shape": shape,
                    "source": source,
                    "dtype": dtype,
                    "zero": zero,
                },
            )
            for source in SOURCES
            for dtype in dtypes
            for zero in ZERO
        }
        found = take_turns(ways, rounds)
    return [{"shape": shape, "way": way, **medians(found[way])} for way in ways]


def rows_of(shape: str, found: dict[str, Samples]) -> list[dict[str, Any]]:
    """Figures of the loaders at one shape."""
    return [
        {
            "shape": shape,
            "way": way,
            "seconds": medians(found[way])["seconds"],
            "peak_gb": max(found[way]["peak_gb"]),
            "added_gb": max(found[way]["added_gb"]),
            "parameters": SHAPES[shape].policy.matrices + SHAPES[shape].policy.head,
            "samples": found[way],
        }
        for way in LOADERS
    ]


def main() -> None:
    """Load every shape in every way, tokenise, and print the tables."""
    choices = parser(__doc__, shape=["tiny", "opt125m"])
    choices.add_argument("--sharded_shape", choices=SHAPES, default="llama60m")
    choices.add_argument("--sharded_dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    options = choices.parse_args()
    rows: list[dict[str, Any]] = []
    script = Path(__file__)
    for shape in options.shape:
        with tempfile.TemporaryDirectory() as folder:
            make_models(Path(folder), SHAPES[shape])
            shared = {"folder": folder, "device": options.device}
            ways = {way: Way(script=script, task=shared | {"way": way}) for way in LOADERS}
            rows += rows_of(shape, take_turns(ways, options.rounds))
    records = MICRO_RECORDS if options.shape == ["micro"] else RECORDS
    task = {"way": "tokenise", "records": records}
    rates = take_turns({"tokenise": Way(script=script, task=task)}, options.rounds)["tokenise"]
    sharded = sharded_rows(options.sharded_shape, options.sharded_dtypes, options.rounds)
    keys = ("seconds", "peak_gb", "added_gb")
    loaded = table(
        ("shape, way", "seconds", "peak GB", "of it by loading, GB"),
        [[f"{r['shape']}, {r['way']}", *(r[key] for key in keys)] for r in rows],
    )
    tokenised = table(("tokenising, phase", "rows/s"), [[*pair] for pair in medians(rates).items()])
    columns = [key for key in sharded[0] if key not in ("shape", "way")]
    split = table(
        ("two ranks, way", *(column.replace("_", " ") for column in columns)),
        [[f"{r['shape']}, {r['way']}", *(r[key] for key in columns)] for r in sharded],
    )
    figures = {"rows": rows, "sharded": sharded, "rows_per_second": medians(rates)}
    finish(options, f"{loaded}\n\n{split}\n\n{tokenised}", figures | {"records": records})


if __name__ == "__main__":
    start(main, measure)
