"""Seconds and memory until the first optimizer step on a file of millions of rows.

    python benchmarks/large_data.py [--rows 2000000] [--suffix .jsonl .jsonl.gz]

The file has invented prompts and answers of 30 to 60 tokens together; a run of ``phase=sft`` on the
CPU starts from it with the default model and a byte-level tokenizer. The seconds are from the
command to the end of the first step, with imports, the measurement of 512 held-out examples, and
a page cache that has just seen the file. The CPU seconds, of all processes, show what the machine
would need without other programs: on two cores at least half of them. The memory is the peak of
the proportional set sizes of all processes, sampled five times a second: pages that processes
share count once.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rlhf.data.files import open_text
from rlhf.models.tokenizers import train_tokenizer

ROOT = Path(__file__).parents[1]
VOCABULARY, SAMPLE = 8000, 20_000  # tokens; rows that the tokenizer is trained on
TICK = 0.2  # seconds between two looks at the memory


def write_rows(file: Path, rows: int) -> None:
    """Write invented rows, with another prompt in each."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(3000)]
    with gzip.open(file, "wt") if file.suffix == ".gz" else file.open("w") as stream:
        for number in range(rows):
            asked, said = rng.choices(words, k=rng.randint(10, 20)), rng.choices(words, k=18)
            prompt, answer = f"{number}: {' '.join(asked)}?", f"{' '.join(said)}."
            stream.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")


def train_on_first_rows(file: Path, folder: Path) -> float:
    """Save a tokenizer that is trained on the first rows; return the mean tokens of a row."""
    with open_text(file) as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(SAMPLE), strict=False)]
    texts = [f"{row['prompt']} {row['completion']}" for row in rows]
    tokenizer = train_tokenizer(texts, vocab_size=VOCABULARY)
    tokenizer.save_pretrained(folder)
    return sum(map(len, tokenizer(texts[:1000]).input_ids)) / 1000


class Use(NamedTuple):
    """What a process and all that it started use: KiB now, and CPU seconds so far."""

    memory: int
    cpu_seconds: float


def use_of_tree(process: int) -> Use:
    """Return the use of a process and of all processes that it started."""
    memory, ticks, waiting = 0, 0, [process]
    while waiting:
        here = Path(f"/proc/{waiting.pop()}")
        try:
            lines = (here / "smaps_rollup").read_text().splitlines()
            memory += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            fields = (here / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # its own, and those of ended processes
            for task in (here / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (OSError, StopIteration):  # it has ended
            continue
    return Use(memory, ticks / os.sysconf("SC_CLK_TCK"))


def measure_start(file: Path, folder: Path) -> tuple[float, float, float]:
    """Return the seconds until the first step of a run, CPU seconds, and its peak memory in GB."""
    run_dir = folder / f"run{file.suffix}"
    words = [
        *("phase=sft", "data=local", f"data.path={file}", "data.split=[1,0,0]", "hardware=cpu"),
        *(f"model.tokenizer={folder / 'tokenizer'}", "sft.batch_size=16", f"run_dir={run_dir}"),
        *("checkpoint.stop_after=sft/1", f"data.cache_dir={folder / 'cache'}"),
    ]
    begun, peak, cpu_seconds = time.monotonic(), 0, 0.0
    process = subprocess.Popen([sys.executable, "launch.py", *words], cwd=ROOT)
    while process.poll() is None and not has_step(run_dir / "metrics.jsonl"):
        use = use_of_tree(process.pid)
        peak, cpu_seconds = max(peak, use.memory), max(cpu_seconds, use.cpu_seconds)
        time.sleep(TICK)
    seconds = time.monotonic() - begun
    process.wait()
    return seconds, cpu_seconds, peak * 1024 / 1e9


def has_step(file: Path) -> bool:
    """Return True if a run has logged an optimizer step."""
    return file.exists() and "sft/learning_rate" in file.read_text()


def main() -> None:
    """Measure each form of the file, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--suffix", nargs="+", default=[".jsonl", ".jsonl.gz"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        lines = []
        for suffix in options.suffix:
            file = Path(place) / f"rows{suffix}"
            write_rows(file, options.rows)
            tokens = train_on_first_rows(file, Path(place) / "tokenizer")
            seconds, cpu_seconds, memory = measure_start(file, Path(place))
            use = f"{seconds:.0f} | {cpu_seconds:.0f} | {memory:.2f}"
            lines.append(f"| {suffix} | {file.stat().st_size / 1e6:.0f} | {tokens:.0f} | {use} |")
            file.unlink()
    print("| form | MB | tokens per row | seconds to the first step | CPU seconds | GB |")
    print("| --- |" + 5 * " ---: |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
