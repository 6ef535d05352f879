"""Interpolations: in words of a command, in presets of one's own, in sweeps and in stored runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

from hydra.errors import HydraException

from rlhf.config.hydra_errors import explain_hydra_error
from rlhf.jobs.launch_command import parse_command
from tests.fuzz.case import Case
from tests.fuzz.command_words import START, launched
from tests.fuzz.run_folders import COMMANDS, SECRET, copied

# Every one is wrong wherever it stands: no such key or variable, a loop, a secret, no grammar.
WRONG = (
    *("nowhere", "sft.nowhere", "oc.env:RLHF_NOT_SET", "oc.env:RLHF_KEY", "..", "...x", ".name.x"),
    *(
        "hydra:nowhere",
        "hydra:job.nowhere",
        "hydra:",
        "python:1",
        "nope:1",
        "oc.env:",
        "oc.decode:",
    ),
    *("oc.create:${nowhere}", "oc.select:", "${nowhere}", "oc.decode:'['", "oc.env:[1]", "{", ":"),
    *("oc.dict.keys:seed", "oc.deprecated:nowhere", "oc.env:RLHF_NOT_SET,${nowhere}", "\x1b[2J"),
    *("name.${name}", "oc.env:${oc.env:RLHF_NOT_SET}", "sft[0]", "[0]", "oc.select:${nowhere},1"),
)
KEYS: tuple[str, ...] = (
    "name",
    "tracking.project",
    "sft.lr",
    "seed",
    "ppo.kl_ctl",
    "data.path",
    "run_dir",
    "plan",
)
KEYS += ("model.vocab_size", "phase.order", "resume", "from_run")
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.name")


def cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield interpolations without a value; the command must refuse every one and name it."""
    os.environ["RLHF_KEY"] = SECRET
    while True:
        inner, key = draw.choice(WRONG), draw.choice(KEYS)
        wrong = draw.choice([f"${{{inner}}}", f"a-${{{inner}}}", f"${{{inner}}}${{seed}}"])
        words = [*draw.choice([[], ["-m", f"hydra.sweep.dir={folder}/sweep"]]), *START]
        match draw.choice(["word", "word", "loop", "hydra", "preset", "sweep", "stored"]):
            case "word":
                act = partial(launched, [*words, f"{key}='{wrong}'"], folder)
                name = f"{key}={wrong}"
            case "loop":
                around = draw.sample(KEYS, draw.randint(1, 3))
                loop = [
                    f"{a}=${{{b}}}" for a, b in zip(around, around[1:] + around[:1], strict=True)
                ]
                act, name = partial(launched, [*words, *loop], folder), " ".join(loop)
            case "hydra":
                key = draw.choice(FOLDERS)
                act = partial(launched, [*words, f"{key}='{wrong}'"], folder)
                name = f"{key}={wrong}"
            case "preset":
                (folder / "experiment").mkdir(exist_ok=True)
                text = f"# @package _global_\n{nested(key, wrong)}\n"
                (folder / "experiment/own.yaml").write_text(text)
                own = [f"--config-dir={folder}", "experiment=own", *START[1:]]
                act, name = partial(launched, own, folder), f"preset {key}: {wrong}"
            case "sweep":
                (folder / "sweeps").mkdir(exist_ok=True)
                (folder / "sweeps/own.yaml").write_text(f"{key}: [{wrong!r}]\nseed: [1, 2]\n")
                own = ["-m", "sweep=own", *START]
                act = partial(swept, own, folder)
                name = f"sweep {key}: {wrong}"
            case _:
                run_dir = copied(folder)
                path = run_dir / "config.yaml"
                path.write_text(path.read_text().replace("name: smoke", f"name: {wrong!r}"))
                door = draw.choice(list(COMMANDS))
                act, name = partial(COMMANDS[door], run_dir), f"stored name: {wrong}, {door}"
        # Few runs read Hydra's own keys, and its resolver answers null for an unknown one.
        yield Case(name, act, must_refuse="hydra" not in name)


def swept(words: list[str], folder: Path) -> None:
    """Start the sweep of a definition in ``folder``, as launch.py does."""
    try:
        with parse_command(words, folder / "sweeps", leads=True) as command:
            launched(command.words, folder)
    except HydraException as error:
        raise explain_hydra_error(error, words) or error from error


def nested(key: str, value: str) -> str:
    """Return YAML that sets a dotted key."""
    first, _, rest = key.partition(".")
    return f"{first}: {{{rest}: {value!r}}}" if rest else f"{first}: {value!r}"
