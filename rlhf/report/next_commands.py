"""The commands at the end of a run that continue from it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from rlhf.base.stored_files import SAMPLE, read_lines
from rlhf.checkpoint.example_code import example_code
from rlhf.config.choices import Source
from rlhf.config.freeze import command_words, frozen_keys

POLICIES = ("ppo/actor", "dpo/actor", "sft/model")
PLACES = ("run_dir", "resume")
OF_ALL_DATA = (
    *("data.split", "data.eval_share", "data.template", "data.clean", "data.deduplicate"),
    *("data.bucket_by_length", "data.cache_dir"),
)


def what_to_type_next(run_dir: Path) -> list[str]:
    """Return commands to copy: use the model, measure it, repeat the run with a change or data."""
    folders = [run_dir / path for path in POLICIES if (run_dir / path).exists()]
    lines = ["What to type next"]
    if folders:
        prompts = [sample["prompt"] for sample in read_lines(run_dir / "samples.jsonl", SAMPLE)]
        has_template = (folders[0] / "chat_template.jinja").exists()
        lines += [
            "  # use the model, in Python",
            *example_code(str(short(folders[0])), prompts, has_chat_template=has_template),
            "  # talk to it, and measure it",
            shlex.join(["python", "-m", "rlhf.chat", str(short(run_dir))]),
            shlex.join(["python", "-m", "rlhf.evaluate", str(short(run_dir))]),
        ]
    if any(run_dir.glob("wandb/offline-run-*")):
        sync = f"wandb sync {shlex.quote(str(short(run_dir)))}/wandb/offline-run-*"
        lines += ["  # upload the metrics", sync]
    # The overrides of the command that started the run, without the run's own place.
    typed = [word for word in command_words(run_dir) if _key(word) not in PLACES]
    if (run_dir / "ppo/actor").exists():
        kl_ctl = frozen_keys(run_dir)["ppo.kl_ctl"]
        lines += [
            "  # the same run, held closer to the reference",
            _command(typed, {"ppo.kl_ctl": f"{2 * kl_ctl or 0.1:g}"}),
        ]
    if frozen_keys(run_dir).get("data.source") != Source.local:
        lines += [
            "  # learn from your own examples",
            _command(_without_data(typed), {"data": "local", "data.path": "FILE"}),
        ]
    return [lines[0], *(f"  {line.strip()}" for line in lines[1:])]


def short(path: Path) -> Path:
    """Return ``path`` relative to the current folder if it is inside it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _without_data(words: Iterable[str]) -> list[str]:
    """Return ``words`` without those that name examples; how they are used stays."""
    keys = {word: _key(word) for word in words}
    return [
        word
        for word, key in keys.items()
        if key not in ("data", "from_run") and (not key.startswith("data.") or key in OF_ALL_DATA)
    ]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _command(words: Iterable[str], changes: dict[str, str]) -> str:
    """Return the command with ``changes`` instead of the words that set the same keys."""
    kept = [word for word in words if _key(word) not in changes]
    return shlex.join(["python", "launch.py", *kept, *(f"{k}={v}" for k, v in changes.items())])
