"""Words of a command: interpolations, flags, texts of another form, and absurd lengths."""

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

from hydra.errors import HydraException

import launch
from rlhf.config.hydra_errors import explain_hydra_error
from rlhf.jobs.launch_command import parse_command
from tests.fuzz.case import Case, refused_by

START = ["experiment=smoke", "launcher.dry_run=true", "hardware.dtype=fp32"]
KEYS = """name tracking.project sft.lr seed ppo.kl_ctl data.path data.size run_dir plan resume
    model.vocab_size model.architecture.hidden_size phase.order from_run hardware.dtype""".split()
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.name")
# Every one is wrong wherever it stands: no such key or variable, a loop, a secret, no grammar.
WRONG = """nowhere sft.nowhere oc.env:RLHF_NOT_SET oc.env:RLHF_KEY .. ...x .name.x hydra:nowhere
    hydra:job.nowhere hydra: python:1 nope:1 oc.env: oc.decode: oc.create:${nowhere} oc.select:
    ${nowhere} oc.decode:'[' oc.env:[1] { : oc.dict.keys:seed oc.deprecated:nowhere name.${name}
    oc.env:RLHF_NOT_SET,${nowhere} oc.env:${oc.env:RLHF_NOT_SET} sft[0] [0] a:b:c:d""".split()
VALUES = [*"[]'\"\\=,*@#~", "{a:", "null", "nan", "-inf", "1e999", "0x1f", "", "\x1b[2J", "\u202e"]
VALUES += ["a b", "!!python/object:os.system", "&a [*a]", "true", "choice(1,2)", "glob(*)"]
VALUES += ["interval(0,1)", "sort(3,1)"]
FLAGS = """--resolve --experimental-rerun=x.pickle --exp=x -x --cfg --cfg=nope -h=1 ~hydra --seed
    --config-dir=/nope --config-name=nope --config-path=/ --package=../x hydra.run.dir=/proc/x
    hydra.sweeper.params=3 hydra.job.chdir=x hydra=nope hydra.verbose=[1] hydra/launcher=no
    +hydra.job_logging.root.handlers=[x]""".split()
SECRET = "zzsecretzz-9"


def cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield commands that only print what would be started."""
    os.environ["RLHF_KEY"] = SECRET
    while True:
        key, must_refuse = draw.choice(KEYS), False
        match draw.randrange(6):
            case 0 | 1:
                yield interpolation(draw, folder, key)
                continue
            case 2:
                word = f"{draw.choice(['', '+', '++', '~'])}{key}={draw.choice(VALUES)}"
            case 3:
                word = draw.choice(FLAGS)
            case 4:
                long = draw.choice(["9", "x", "[", "{a: ", "a.", "("]) * draw.choice([60, 99_999])
                word = draw.choice([f"{key}={long}", f"{long}=1", long])
            case _:
                letters = [draw.choice("=+~-_.,:;[]{}()$'\"\\/ @#%&*?!a1\n\t\0é") for _ in range(9)]
                word = key[: draw.randrange(9)] + "".join(letters)
        yield Case(repr(word[:80]), partial(launched, [*START, word], folder), must_refuse)


def interpolation(draw: Random, folder: Path, key: str) -> Case:
    """Return a command with an interpolation without a value; it must be refused and named."""
    inner = draw.choice(WRONG)
    wrong = draw.choice([f"${{{inner}}}", f"a-${{{inner}}}", f"${{{inner}}}${{seed}}"])
    start = [word for word in START if not word.startswith(f"{key}=")]  # would replace the key
    match draw.choice(["word", "word", "loop", "hydra", "preset", "sweep"]):
        case "word":
            name = f"{key}='{wrong}'"
            act = partial(launched, [*START, name], folder)
        case "loop":
            around = draw.sample(KEYS, draw.randint(1, 3))
            loop = [f"{a}=${{{b}}}" for a, b in zip(around, around[1:] + around[:1], strict=True)]
            act, name = partial(launched, [*START, *loop], folder), " ".join(loop)
        case "hydra":
            name = f"{draw.choice(FOLDERS)}='{wrong}'"
            act = partial(launched, [*START, name], folder)
        case "preset":
            (folder / "experiment").mkdir(exist_ok=True)
            text = f"# @package _global_\n{nested(key, wrong)}\n"
            (folder / "experiment/own.yaml").write_text(text)
            own = [f"--config-dir={folder}", "experiment=own", *start[1:]]
            act, name = partial(launched, own, folder), f"preset {key}: {wrong}"
        case _:
            (folder / "sweeps").mkdir(exist_ok=True)
            (folder / "sweeps/own.yaml").write_text(f"{key}: [{wrong!r}]\nseed: [1, 2]\n")
            act, name = partial(swept, ["-m", "sweep=own", *start], folder), f"sweep {key}: {wrong}"
    # Few runs read Hydra's own keys, and its resolver answers null for an unknown one.
    return Case(name, act, must_refuse="hydra" not in name)


def launched(words: list[str], folder: Path) -> None:
    """Give the words to launch.py, in this process; raise what it printed if it refused them."""
    os.chdir(folder)
    os.environ["HYDRA_MAIN_MODULE"] = "__main__"  # conf/ is beside launch.py, whoever imports it
    sys.argv[1:] = words
    refused_by(launch.start)


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
