"""An iteration of PPO split into its parts, beside the peers and the machine's limits.

    python benchmarks/ppo_step.py [--shape tiny] [--rounds 3] [--dtype bf16] [--peer trl]

16 prompts of 64 tokens, exactly 64 sampled response tokens each, one PPO epoch, one optimiser step
for actor and critic, a learned reward model, a frozen reference. The ways take turns; each turn is
a new process, whose first two iterations are not counted.

The peers' times are those that benchmarks/speed.md has for this kind of CPU, from another machine
and day; they are not scaled. ``generate`` of transformers in fp32 runs in the same turns: its time
here and its time there say how alike the machines were.
``--isa none`` runs this project's ways without its kernels too: they are nowhere faster.
``--busy 1 2`` runs the ways beside one and beside two processes that keep a core busy each.
``--peer trl`` runs TRL's PPO too, with the interpreter of an environment of its own:

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.12.0 transformers==5.23.0 \
        accelerate==1.15.0 datasets
    python benchmarks/ppo_step.py --shape tiny --peer trl --peer-python trl/bin/python

Floors and FLOP are those of ``floors.py``: a part's share is its floor over its time. MFU is the
iteration's FLOP per second over the measured rate of large products.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from common import (
    BENCHMARKS,
    KEPT_MEMORY,
    Samples,
    Way,
    add_busy_option,
    busy_ways,
    capped_ways,
    cpu_kind,
    finish,
    medians,
    parser,
    table,
    take_turns,
)
from floors import BYTES, FLOORS, Rates, floors_way, iteration_flops
from shapes import SHAPES, Shape, Work, make_models

from rlhf.base.cpu import Isa
from rlhf.jobs.launch_command import SPIN_COUNT, SPINS

GENERATE = "generate fp32"
PARTS = ("generate", "score", "train")
PUBLISHED = (*PARTS, "iteration", "peak_gb")


class Peer(NamedTuple):
    """Published medians: seconds of an iteration and its parts, peak memory in 1e9 bytes."""

    name: str
    generate: float
    score: float
    train: float
    iteration: float
    peak_gb: float


class Kind(NamedTuple):
    """What benchmarks/speed.md, "The peers", has for one kind of CPU: 2 cores, torch 2.13.0."""

    generate_seconds: dict[str, float]
    """Of transformers' generate in fp32 with its dynamic cache, by shape."""
    peers: dict[str, list[Peer]]


AMX = Kind(
    {"tiny": 0.65, "opt125m": 6.1},
    {
        "tiny": [
            Peer("DeepSpeed-Chat fp32", 0.65, 0.58, 0.79, 2.02, 1.4),
            Peer("DeepSpeed-Chat fp32, kept memory", 0.66, 0.45, 0.71, 1.83, 1.6),
            Peer("DeepSpeed-Chat bf16", 0.56, 0.18, 0.55, 1.34, 1.2),
            Peer("TRL 1.12 fp32", 0.65, 0.49, 0.92, 2.20, 1.6),
            Peer("TRL 1.12 fp32, kept memory", 0.62, 0.45, 0.67, 1.90, 1.7),
            Peer("trlx fp32, shared trunk", 0.67, 0.67, 0.73, 2.12, 1.6),
        ],
        "opt125m": [
            Peer("DeepSpeed-Chat fp32", 6.1, 6.2, 8.7, 20.8, 6.7),
            Peer("DeepSpeed-Chat fp32, kept memory", 6.1, 4.0, 6.2, 16.3, 7.5),
            Peer("DeepSpeed-Chat bf16", 3.6, 1.9, 4.0, 9.5, 5.2),
            Peer("TRL 1.12 fp32", 6.2, 2.5, 10.6, 19.3, 7.3),
            Peer("TRL 1.12 fp32, kept memory", 6.1, 2.4, 6.2, 14.9, 7.9),
            Peer("trlx fp32, shared trunk", 6.3, 8.8, 7.8, 22.8, 7.3),
        ],
    },
)
AVX512_BF16 = Kind(
    {"tiny": 0.72, "opt125m": 7.2},
    {
        "tiny": [
            Peer("DeepSpeed-Chat bf16", 0.61, 0.29, 0.57, 1.47, 1.0),
            Peer("DeepSpeed-Chat bf16, kept memory", 0.63, 0.26, 0.55, 1.44, 1.1),
            Peer("DeepSpeed-Chat fp32", 0.71, 0.82, 1.24, 2.75, 1.2),
            Peer("TRL 1.12 fp32", 0.69, 0.73, 1.22, 2.92, 1.6),
        ],
        "opt125m": [
            Peer("DeepSpeed-Chat bf16", 3.84, 2.98, 5.70, 12.8, 5.0),
            Peer("DeepSpeed-Chat bf16, kept memory", 3.61, 1.96, 3.46, 8.99, 5.7),
            Peer("DeepSpeed-Chat fp32", 7.23, 9.02, 15.7, 31.4, 6.3),
            Peer("TRL 1.12 fp32", 7.50, 4.44, 15.7, 27.9, 7.3),
        ],
    },
)
KINDS = {"amx": AMX, "avx512_bf16": AVX512_BF16}
HEADER = ("way", *PARTS, "iteration, s", "MFU", "peak GB", "times as long as the first")
SHARES = ("part", "seconds", "TFLOP", "TFLOP/s", "floor, s", "share of floor")


def own_way(options: argparse.Namespace, shared: dict[str, Any], dtype: str) -> Way:
    """This project's iteration in one precision."""
    overrides = [
        f"rollout={options.rollout}",
        f"hardware.device={options.device}",
        f"hardware.dtype={dtype}",
        *options.overrides,
    ]
    return Way(
        script=BENCHMARKS / "ppo_parts.py",
        task=shared | {"overrides": overrides},
        environment={SPIN_COUNT: os.environ.get(SPIN_COUNT, SPINS)},  # as launch.py sets it
    )


def peer_ways(options: argparse.Namespace, shared: dict[str, Any]) -> dict[str, Way]:
    """TRL as it is, and where glibc keeps freed memory."""
    script, python = BENCHMARKS / "peer_trl.py", str(options.peer_python.absolute())
    return {
        "TRL fp32, this run": Way(script=script, task=shared, python=python),
        "TRL fp32, kept memory, this run": Way(
            script=script, task=shared, python=python, environment=KEPT_MEMORY
        ),
    }


def own_row(
    name: str, samples: Samples, floors: dict[str, float], flops: dict[str, float], peak: float
) -> dict[str, Any]:
    """Figures of one way that ran here, with the share of its floors that each part reaches."""
    middle = medians(samples)
    seconds = {part: middle[part] for part in PARTS}
    return {
        "way": name,
        **seconds,
        "iteration": middle["iteration"],
        "mfu": sum(flops.values()) / middle["iteration"] / peak,
        "peak_gb": max(samples["peak_gb"]),
        "flop": flops,
        "tflop_per_s": {part: flops[part] / seconds[part] / 1e12 for part in PARTS},
        "floor_seconds": floors,
        "share_of_floor": {part: floors[part] / seconds[part] for part in PARTS},
        "samples": samples,
    }


def part_floors(
    shape: Shape, work: Work, dtype: str, rates: Rates, flops: dict[str, float]
) -> dict[str, float]:
    """Least seconds of each part: of generation by its reads, of the others by their products."""
    floors = {part: flops[part] / rates.gemm[dtype] for part in PARTS}
    return floors | {"generate": rates.generation_floor(shape.policy, work, dtype)}


def published(kind: str, shape: str) -> list[dict[str, Any]]:
    """The peers' rows of this kind of CPU, as they were measured."""
    return [
        {"way": f"{peer.name}, published"} | {key: getattr(peer, key) for key in PUBLISHED}
        for peer in (KINDS[kind].peers.get(shape, []) if kind in KINDS else [])
    ]


def likeness(kind: str, shape: str, seconds: float) -> str:
    """How long generate took here, and where the peers were measured."""
    there = KINDS[kind].generate_seconds.get(shape) if kind in KINDS else None
    beside = f"; {there} s where the peers were measured" if there else "; no peers of this kind"
    return f"transformers' generate in fp32 took {seconds:.3g} s{beside} ({kind})."


def report(options: argparse.Namespace, rows: list[dict[str, Any]], rates: Rates) -> str:
    """The table of the ways, and the shares of the floors of those that are this project's."""
    first = rows[0]["iteration"]
    keys = ("way", *PARTS, "iteration", "mfu", "peak_gb")
    times = [[*(row.get(key) for key in keys), row["iteration"] / first] for row in rows]
    shares = [
        [
            f"{row['way']}: {part}",
            row[part],
            row["flop"][part] / 1e12,
            row["tflop_per_s"][part],
            row["floor_seconds"][part],
            row["share_of_floor"][part],
        ]
        for row in rows
        if row["way"].startswith("rlhf")
        for part in PARTS
    ]
    title = f"Shape {options.shape}, {options.device}, seconds"
    return "\n\n".join([title, table(HEADER, times), table(SHARES, shares), rates.in_words()])


def read_options() -> argparse.Namespace:
    """The command's options."""
    options = parser(__doc__, shape="tiny")
    options.add_argument("--dtype", nargs="+", choices=BYTES, default=["bf16"])
    options.add_argument("--rollout", choices=("fast", "hf"), default="fast")
    options.add_argument("--isa", nargs="+", choices=Isa.__members__, default=[])
    add_busy_option(options)
    options.add_argument("--overrides", nargs="*", default=[], help="further config overrides")
    options.add_argument("--peer", choices=("trl",))
    options.add_argument("--peer-python", type=Path, help="interpreter of the peer's environment")
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--tokens", type=int, help="of prompt and of response; 64; on a GPU 256")
    given = options.parse_args()
    if given.peer and given.peer_python is None:
        options.error("--peer trl needs --peer-python PATH, see the docstring")
    given.tokens = given.tokens or (256 if given.device == "cuda" else 64)
    return given


def main() -> None:
    """Let the ways take turns, and print the tables."""
    options = read_options()
    shape = SHAPES[options.shape]
    work = Work(
        sequences=options.batch, prompt_tokens=options.tokens, response_tokens=options.tokens
    )
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder), shape)
        shared = {"folder": folder, "device": options.device, "repeats": options.repeats}
        shared |= {"vocab": shape.policy.vocab, "work": asdict(work)}
        ways = {f"rlhf {dtype}": own_way(options, shared, dtype) for dtype in options.dtype}
        ways |= capped_ways(ways, options.isa, prefix="rlhf")
        ways |= peer_ways(options, shared) if options.peer else {}
        ways |= busy_ways(ways, options.busy)
        if options.device == "cpu":
            task = shared | {"kind": "generate", "dtype": "fp32", "cache": "dynamic"}
            ways[GENERATE] = Way(script=BENCHMARKS / "rollout_ways.py", task=task)
        dtypes = {*options.dtype, "fp32"}  # peers compute in fp32
        ways[FLOORS] = floors_way(options.device, shape.policy, work, sorted(dtypes))
        found = take_turns(ways, options.rounds)
    rates = Rates.of(found.pop(FLOORS))
    generated = found.pop(GENERATE, None)
    generate_seconds = None if generated is None else medians(generated)["seconds"]
    rows = []
    for name, samples in found.items():
        dtype = name.removeprefix("rlhf ").partition(",")[0] if name.startswith("rlhf") else "fp32"
        reuses = samples.get("reused", [1.0])[-1] == 1.0  # TRL always does
        flops = iteration_flops(shape, work, reuses_logprobs=reuses)
        floors = part_floors(shape, work, dtype, rates, flops)
        rows.append(own_row(name, samples, floors, flops, rates.gemm[dtype]))
    text = ""
    if generate_seconds is not None:
        rows += published(cpu_kind(), options.shape)
        text = "\n\n" + likeness(cpu_kind(), options.shape, generate_seconds)
    figures = {"rows": rows, "generate_fp32_seconds": generate_seconds, "rates": rates.as_json()}
    finish(options, report(options, rows, rates) + text, figures)


if __name__ == "__main__":
    main()
