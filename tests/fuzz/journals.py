"""Journals of a search that another process or a full drive has damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

from rlhf.jobs.search import JOURNAL, open_study
from rlhf.jobs.search_command import Search, StudyConfig
from tests.fuzz.case import Case

LINES: tuple[bytes, ...] = (
    b"text",
    b"\0\0",
    b"[]",
    b"5",
    b"{}",
    b'{"op_code": "x"}',
    b'{"op_code": 99}',
    b"\xff",
)
LINES += (b"[" * 50_000, b'{"op_code": 4}', b'{"op_code": 0, "worker_id": 5}', b"9" * 5000)


def searched(folder: Path) -> None:
    """Open the study twice, as a continued search does, and ask for a trial."""
    for _ in range(2):
        study = open_study(
            Search(StudyConfig(trials=9, maximize=["ppo.gold_after"]), [], [], folder)
        )
        study.ask().suggest_float("sft.lr", 1e-5, 1e-3)


def cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield journals of two trials: cut, with odd lines, or something else than a file."""
    while True:
        searched(folder)
        path, must_refuse = folder / JOURNAL, False
        content = path.read_bytes()
        match draw.choice(["cut", "line", "flip", "kind"]):
            case "cut":
                at = draw.randrange(len(content))
                path.write_bytes(content[:at])
                name = f"cut after {at} bytes"
            case "line":
                lines, line = content.splitlines(True), draw.choice(LINES)
                lines.insert(draw.randrange(len(lines)), line + b"\n")
                path.write_bytes(b"".join(lines))
                name, must_refuse = f"line {line[:20]!r}", True
            case "flip":
                changed = bytearray(content)
                for _ in range(draw.choice([1, 20])):
                    changed[draw.randrange(len(changed))] = draw.randrange(256)
                path.write_bytes(changed)
                name = "other bytes"
            case _:
                path.unlink()
                name, must_refuse = draw.choice(["folder", "pipe", "link"]), True
                if name == "folder":
                    path.mkdir()
                elif name == "pipe":
                    os.mkfifo(path)
                else:
                    (folder / "elsewhere").write_bytes(content)
                    path.symlink_to("elsewhere")
        yield Case(name, partial(searched, folder), must_refuse)
