"""A run directory with answers to compare, without a run."""

import json
from collections.abc import Sequence
from pathlib import Path


def prompt(number: int) -> str:
    return f"\n\nHuman: Question {number}?\n\nAssistant:"


def run_with(run_dir: Path, before: Sequence[str], after: Sequence[str]) -> Path:
    """Write what PPO leaves of its held-out answers at its first and last step."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("seed: 1\n")
    steps = {0: ("actor", before), 7: ("actor_ema", before), 8: ("actor", after)}
    rows = [
        {"phase": "ppo", "step": step, "model": model, "prompt": prompt(i), "response": text}
        for step, (model, texts) in steps.items()
        for i, text in enumerate(texts)
    ]
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir
