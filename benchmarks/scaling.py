"""What the parts of a PPO iteration cost as the work grows, and whether cost follows the tokens.

    python benchmarks/scaling.py [--shape tiny] [--rounds 3] [--sweeps response tokens]

Each sweep changes one thing: the length of the responses, the batch, the share of the prompts'
columns that is padding, the size of the models. The sweep ``tokens`` answers 256 prompts, 16 rows
at once, three times: with responses of mixed length, from next to nothing to the maximum, a quarter
of it in the mean; with as many tokens in responses of equal length; and with the maximum in all of
them. ``rollout=fast`` alone takes such limits. All points take turns; each turn is a new process
with two iterations that are not counted.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from common import BENCHMARKS, Samples, Way, finish, medians, parser, table, take_turns
from shapes import SHAPES, Work, make_models

ROWS_AT_ONCE = 16
SEQUENCES = 256  # of the sweep `tokens`
LONGEST = 4  # the maximum of the sweep `tokens` is so many times the mean
SIZES = ("tiny", "small", "opt125m")
PARTS = ("generate", "score", "train")
HEADER = ("sweep, point", *PARTS, "iteration, s", "response tokens", "tokens/s", "peak GB")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One amount of work; ``at`` is its place on the sweep's axis."""

    sweep: str
    at: float | str
    shape: str
    work: Work
    overrides: list[str] = field(default_factory=list)
    limits: list[int] | None = None

    @property
    def name(self) -> str:
        """Sweep and place."""
        return f"{self.sweep}, {self.at}"


def mixed_lengths(count: int, longest: int) -> list[int]:
    """Lengths u^3 * longest for u spread evenly over (0, 1): a quarter of ``longest`` in the mean.

    Single tokens more or less make that exact; the order is shuffled.
    """
    lengths = [max(1, round(longest * ((i + 0.5) / count) ** 3)) for i in range(count)]
    lengths[-1] = longest
    missing, place = count * longest // 4 - sum(lengths), 0
    while missing:
        change = 1 if missing > 0 else -1
        if 1 <= lengths[place] + change < longest:
            lengths[place] += change
            missing -= change
        place = (place + 1) % (count - 1)
    random.Random(1).shuffle(lengths)
    return lengths


def response_sweep(shape: str, tokens: int) -> Iterator[Point]:
    """Responses from a quarter of ``tokens`` to four times as long."""
    for at in (tokens // 4, tokens // 2, tokens, 2 * tokens, 4 * tokens):
        work = Work(prompt_tokens=tokens, response_tokens=at)
        yield Point(sweep="response", at=at, shape=shape, work=work)


def batch_sweep(shape: str, tokens: int) -> Iterator[Point]:
    """From 4 to 64 sequences."""
    for at in (4, 8, 16, 32, 64):
        work = Work(sequences=at, prompt_tokens=tokens, response_tokens=tokens)
        yield Point(sweep="batch", at=at, shape=shape, work=work)


def padding_sweep(shape: str, tokens: int) -> Iterator[Point]:
    """Prompts of up to four times ``tokens``, of equal length and more and more mixed.

    In micro-batches of 4: rows of like length are run together.
    """
    for at in (0.0, 0.25, 0.5):
        work = Work(prompt_tokens=4 * tokens, response_tokens=tokens, padding=at)
        overrides = ["ppo.micro_batch_size=4"]
        yield Point(sweep="padding", at=at, shape=shape, work=work, overrides=overrides)


def size_sweep(shape: str, tokens: int) -> Iterator[Point]:
    """Models of three sizes; only the micro model if that is the shape."""
    work = Work(prompt_tokens=tokens, response_tokens=tokens)
    for at in SIZES if shape != "micro" else (shape,):
        yield Point(sweep="size", at=at, shape=at, work=work)


def token_sweep(shape: str, tokens: int, sequences: int = SEQUENCES) -> Iterator[Point]:
    """Responses of mixed and of equal length: of as many tokens together, and of the maximum."""
    longest = LONGEST * tokens
    mixed = mixed_lengths(sequences, longest)
    work = Work(sequences=sequences, prompt_tokens=tokens, response_tokens=longest)
    overrides = [f"rollout.max_rows={ROWS_AT_ONCE}", f"ppo.micro_batch_size={ROWS_AT_ONCE}"]
    equal = {"equal": [tokens] * sequences, "longest": [longest] * sequences}
    for at, limits in {"mixed": mixed, **equal}.items():
        yield Point(
            sweep="tokens", at=at, shape=shape, work=work, overrides=overrides, limits=limits
        )


SWEEPS: dict[str, Callable[[str, int], Iterator[Point]]] = {
    "response": response_sweep,
    "batch": batch_sweep,
    "padding": padding_sweep,
    "size": size_sweep,
    "tokens": token_sweep,
}


def way(point: Point, options: argparse.Namespace, folder: Path) -> Way:
    """The process that measures one point."""
    task = {
        "folder": str(folder / point.shape),
        "vocab": SHAPES[point.shape].policy.vocab,
        "work": asdict(point.work),
        "repeats": options.repeats,
        "limits": point.limits,
        "overrides": [
            f"rollout={options.rollout}",
            f"hardware.device={options.device}",
            f"hardware.dtype={options.dtype}",
            *point.overrides,
        ],
    }
    return Way(script=BENCHMARKS / "ppo_parts.py", task=task)


def row(point: Point, samples: Samples) -> dict[str, Any]:
    """Figures of one point."""
    middle = medians(samples)
    return {
        "sweep": point.sweep,
        "at": point.at,
        "shape": point.shape,
        **{name: middle[name] for name in (*PARTS, "iteration", "tokens")},
        "tokens_per_second": middle["tokens"] / middle["generate"],
        "peak_gb": max(samples["peak_gb"]),
        "samples": samples,
    }


def token_ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens per second of generation with mixed lengths, over those with equal ones."""
    rates = {each["at"]: each["tokens_per_second"] for each in rows if each["sweep"] == "tokens"}
    return {at: rates["mixed"] / rate for at, rate in rates.items() if at != "mixed"}


def main() -> None:
    """Let all points take turns, and print the table."""
    options = parser(__doc__, shape="tiny")
    options.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    options.add_argument("--points", type=int, help="only so many of each sweep")
    options.add_argument("--tokens", type=int, default=64, help="of prompt and of response")
    options.add_argument("--rollout", choices=("fast", "hf"), default="fast")
    options.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    options.add_argument("--prompts", type=int, default=SEQUENCES, help="of the sweep tokens")
    options = options.parse_args()
    sweeps = SWEEPS | {"tokens": partial(token_sweep, sequences=options.prompts)}
    points = {
        point.name: point
        for sweep in options.sweeps
        for point in list(sweeps[sweep](options.shape, options.tokens))[: options.points]
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shape in {point.shape for point in points.values()}:
            make_models(folder / shape, SHAPES[shape])
        ways = {name: way(point, options, folder) for name, point in points.items()}
        found = take_turns(ways, options.rounds)
    rows = [row(points[name], samples) for name, samples in found.items()]
    keys = (*PARTS, "iteration", "tokens", "tokens_per_second", "peak_gb")
    text = table(HEADER, [[f"{r['sweep']}, {r['at']}", *(r[key] for key in keys)] for r in rows])
    ratios = token_ratios(rows)
    if ratios:
        words = ", ".join(f"{ratio:.2f} ({name})" for name, ratio in ratios.items())
        text += f"\n\nTokens per second, mixed over equal lengths: {words}."
    finish(options, text, {"rows": rows, "mixed_over_equal": ratios})


if __name__ == "__main__":
    main()
