"""Words of a command: interpolations, flags, texts of another form, and absurd lengths."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import launch
from tests.fuzz.case import Case, refused_by

START = ["experiment=smoke", "launcher.dry_run=true", "hardware.dtype=fp32"]
KEYS: tuple[str, ...] = (
    "sft.lr",
    "name",
    "seed",
    "ppo.kl_ctl",
    "data.size",
    "run_dir",
    "tracking.tags",
)
KEYS += ("model.architecture.hidden_size", "hardware.dtype", "phase", "plan", "resume", "zero")
GROUPS = ("phase", "zero")
BAD: tuple[str, ...] = (
    "reward.lrr",
    "oc.env:NOPE_NOT_SET",
    "a:b:c:d",
    "sft",
    "python:1",
    "oc.decode:'['",
    "..x",
)
BAD += ("{", "nope", "sft.lr.x", "oc.select:", "hydra:nope.x", "oc.create:1,2,3", "oc.dict.keys:x")
VALUES: tuple[str, ...] = (
    "[",
    "]",
    "{a:",
    "'",
    '"',
    "\\",
    "=",
    ",",
    "*",
    "null",
    "nan",
    "-inf",
    "1e999",
    "0x1f",
    "",
)
VALUES += (
    "\x1b[2J",
    "\u202e",
    "a b",
    "!!python/object:os.system",
    "&a [*a]",
    "@",
    "#",
    "~",
    "true",
)
VALUES += ("choice(1,2)", "range(1,3)", "glob(*)", "interval(0,1)", "sort(3,1)", "shuffle(1,2)")
FLAGS: tuple[str, ...] = (
    "--resolve",
    "--experimental-rerun=x.pickle",
    "--exp=x",
    "-x",
    "--cfg",
    "--cfg=nope",
    "-h=1",
)
FLAGS += ("--config-dir=/nope", "--config-name=nope", "--config-path=/", "--package=../x", "--seed")
FLAGS += ("hydra.run.dir=/proc/x", "hydra.sweeper.params=3", "hydra.job.chdir=x", "hydra=nope")
FLAGS += (
    "+hydra.job_logging.root.handlers=[x]",
    "hydra.verbose=[1]",
    "~hydra",
    "hydra/launcher=no",
)


def cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield commands that only print what would be started."""
    while True:
        key = draw.choice(KEYS)
        must_refuse = False
        match draw.randrange(6):
            case 0 | 1:
                key = (
                    "seed" if key in GROUPS else key
                )  # a test's Hydra resolves no names of options
                inner = draw.choice([*BAD, key])
                word = f"{key}=${{{inner}}}"
                must_refuse = "hydra:" not in inner  # which answers null for an unknown key
            case 2:
                word = f"{draw.choice(['', '+', '++', '~'])}{key}={draw.choice(VALUES)}"
            case 3:
                word = draw.choice(FLAGS)
            case 4:
                long = draw.choice(["9", "x", "[", "{a: ", "a.", "("]) * draw.choice(
                    [60, 5000, 99_999]
                )
                word = draw.choice([f"{key}={long}", f"{long}=1", long])
            case _:
                letters = [draw.choice("=+~-_.,:;[]{}()$'\"\\/ @#%&*?!a1\n\t\0é") for _ in range(9)]
                word = key[: draw.randrange(9)] + "".join(letters)
        yield Case(repr(word[:80]), partial(launched, [*START, word], folder), must_refuse)


def launched(words: list[str], folder: Path) -> None:
    """Give the words to launch.py, in this process; raise what it printed if it refused them."""
    os.chdir(folder)
    os.environ["HYDRA_MAIN_MODULE"] = "__main__"  # conf/ is beside launch.py, whoever imports it
    sys.argv[1:] = words
    refused_by(launch.launch)
