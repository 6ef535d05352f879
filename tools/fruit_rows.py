"""Write the rows of experiment=minute: ``python tools/fruit_rows.py rlhf/data/samples``."""

import csv
import random
import sys
from pathlib import Path

FRUITS, THINGS = "plum pear kiwi fig".split(), "desk lamp shoe drum coat bell ring boat".split()
WRONG_PAIRS = 0.1  # people err, too


def write_rows(folder: Path, demonstrations: int = 2000, pairs: int = 1200) -> None:
    """Write demonstrations that name any word, and pairs that prefer the fruit in nine of ten."""
    rng, said = random.Random(1), "It is the {}.".format
    drawn: dict[tuple[str, ...], None] = {}
    while len(drawn) < demonstrations + pairs:
        four = [*rng.sample(THINGS, 3), rng.choice(FRUITS)]
        drawn[tuple(rng.sample(four, 4))] = None
    shown = [(words, f"Pick the fruit: {' '.join(words)}.") for words in drawn]
    responses = [(question, said(rng.choice(words))) for words, question in shown[pairs:]]
    compared = []
    for words, question in shown[:pairs]:
        right = next(word for word in words if word in FRUITS)
        wrong = rng.choice([word for word in words if word != right])
        better, worse = (wrong, right) if rng.random() < WRONG_PAIRS else (right, wrong)
        compared.append((question, said(better), said(worse), said(right)))
    for name, rows in (
        ("demonstrations", [("question", "response"), *responses]),
        ("pairs", [("question", "chosen", "rejected", "answer"), *compared]),
    ):
        with (folder / f"fruit_{name}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    write_rows(Path(sys.argv[1]))
