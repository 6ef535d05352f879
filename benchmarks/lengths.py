"""How long ranks wait for the rank with the most tokens: counts, without a model.

    python benchmarks/lengths.py [--seeds 20]

Responses have log-normal lengths with a mean of a quarter of the limit. A micro-batch takes the
time of its padded tokens. "own rows": each rank learns from what it sampled; "dealt": from its
share of the mini-batch (``rlhf.data.collate.assign_rows_to_ranks``). The figures are the padded
tokens of the slowest rank over the mean of tokens per rank: 1 is the least.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from statistics import fmean

from common import table

from rlhf.data.collate import assign_rows_to_ranks

# Ranks, responses of each, limit of tokens, rows of a micro-batch.
CASES = ((8, 128, 8192, 4), (64, 16, 8192, 1), (64, 16, 8192, 2), (64, 64, 8192, 4))
SIGMAS = (0.6, 1.0)  # of the logarithm of lengths


def draw_lengths(count: int, limit: int, sigma: float, seed: int) -> list[int]:
    """Return ``count`` lengths from 1 to ``limit``."""
    stream, mean = random.Random(seed), limit / 4
    scale = math.log(mean) - sigma**2 / 2
    return [min(limit, max(1, round(stream.lognormvariate(scale, sigma)))) for _ in range(count)]


def slowest(parts: Sequence[Sequence[int]], micro: int) -> float:
    """Return the padded tokens of the slowest rank over the mean; ``parts`` are ranks' lengths."""
    padded = []
    for part in parts:
        lengths = sorted(part, reverse=True)
        padded.append(sum(micro * lengths[first] for first in range(0, len(lengths), micro)))
    return max(padded) / fmean(map(sum, parts))


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=20)
    seeds, rows = range(options.parse_args().seeds), []
    for ranks, own, limit, micro in CASES:
        for sigma in SIGMAS:
            before, after = [], []
            for seed in seeds:
                lengths = draw_lengths(ranks * own, limit, sigma, seed)
                dealt = assign_rows_to_ranks(lengths, ranks=ranks, micro=micro)
                sampled = [lengths[i * own : (i + 1) * own] for i in range(ranks)]
                before.append(slowest(sampled, micro))
                after.append(slowest([[lengths[row] for row in part] for part in dealt], micro))
            name = f"{ranks} ranks x {own}, micro-batches of {micro}, sigma {sigma}"
            rows.append((name, f"{fmean(before):.2f}", f"{fmean(after):.2f}"))
    print(table(["responses", "own rows", "dealt"], rows))


if __name__ == "__main__":
    main()
