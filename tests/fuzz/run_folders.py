"""Run folders that somebody else prepared: links, pipes and lies in place of files and folders."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from random import Random

import yaml
from hydra import compose, initialize_config_dir
from rich.console import Console

from rlhf import export
from rlhf.chat import __main__ as chat
from rlhf.config import run_dir as run_dirs
from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config, write_command, write_frozen_config
from rlhf.evaluate import __main__ as evaluate
from rlhf.models.build import build_actor, build_scorer
from rlhf.report import __main__ as report
from rlhf.run.finished_phase import finish_phase
from rlhf.run.results import write_json
from rlhf.watch.__main__ import drawing_of
from tests.fuzz.case import Case, refused_by
from tests.fuzz.command_words import launched
from tests.fuzz.mutations import mutate_json
from tests.models_on_disk import small_tokenizer, source_of
from tests.runs import ROOT
from tests.watch.watched import PLAN, RESULT, append, sample, sft_lines

SECRET = "zzsecretzz-9"
PLANNED = ["experiment=smoke", "hardware.dtype=fp32", "phase=reward", "plan=only"]
HOSTILE = "\x1b]0;PWN\x07\x1b[2J</script><b>"
LOCKS = (
    f"process {'9' * 5000} on host\n",
    "process -1 on \x1b[2J\n",
    "process 1 on\0",
    "\xff" * 99,
)


@cache
def genuine() -> Path:
    """Make the folder of a run that has finished SFT, without training."""
    run_dir = Path(tempfile.mkdtemp(prefix="rlhf-fuzz-")) / "run"
    run_dir.mkdir()
    words = ["experiment=smoke", "hardware=cpu", "hardware.dtype=fp32", "data.size=200"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        write_frozen_config(to_run_config(compose("config", words)), run_dir)
    write_command(words, run_dir)
    write_json(run_dir / "plan.json", PLAN)
    model = build_actor(source_of("llama"), small_tokenizer(), seed=1)
    for place in ("sft/model", "ppo/actor"):
        model.save_pretrained(run_dir / place)
        small_tokenizer().save_pretrained(run_dir / place)
    build_scorer(source_of("llama"), small_tokenizer(), seed=2).pretrained.save_pretrained(
        run_dir / "reward/model"
    )
    for place in ("reward/model", "tokenizer"):
        small_tokenizer().save_pretrained(run_dir / place)
    append(run_dir / "metrics.jsonl", sft_lines(range(1, 4)))
    append(run_dir / "samples.jsonl", [sample(step, "A cat.") for step in (0, 1)])
    result = {"perplexity_before": 9.0, "perplexity_after": 2.0, "seconds": 1.0}
    finish_phase(run_dir, Phase.sft, result | {"measured": {"hours": 0.1}})
    write_json(run_dir / "result.json", RESULT)
    (run_dir / "run.lock").write_text("process 1 on host\n")
    return run_dir


def copied(folder: Path) -> Path:
    """Copy the genuine folder to ``folder``."""
    return shutil.copytree(genuine(), folder / "run")


def instrument(main: Callable[[Sequence[str]], int], run_dir: Path, *words: str) -> None:
    """Give a run to an instrument, with a line of a dialogue; raise what it refused."""
    os.chdir(run_dir.parent)
    os.environ["RLHF_KEY"] = SECRET
    sys.stdin = io.StringIO("hi\n")
    refused_by(partial(main, [str(run_dir), *words]))


def watch(run_dir: Path) -> None:
    """Draw the screen of ``rlhf.watch --terminal``."""
    file = io.StringIO()
    Console(file=file, width=80, height=24).print(drawing_of(run_dir)())
    assert not {"\x1b", "\x07", SECRET} & {*file.getvalue(), file.getvalue()}


def lock(run_dir: Path) -> None:
    """Lock the run, as every command that writes does."""
    run_dirs.WAIT_SECONDS = 0.0
    with run_dirs.lock_run_dir(run_dir):
        pass


COMMANDS: dict[str, Callable[[Path], None]] = {
    "resume": lambda run: launched([f"resume={run}", "launcher.dry_run=true"], run.parent),
    "from_run": lambda run: launched([*PLANNED, f"from_run={run}"], run.parent),
    "report": lambda run: instrument(report.main, run),
    "chat": lambda run: instrument(chat.main, run),
    "evaluate": lambda run: instrument(evaluate.main, run, "--samples", "1"),
    "export": lambda run: instrument(export.main, run, "--out", f"{run.parent}/exported"),
}
MORE = COMMANDS | {"watch": watch, "lock": lock}


def cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield run folders of which one entry is something else; one command reads each."""
    while True:
        run_dir, victim = copied(folder), folder / "victim"
        victim.mkdir()
        (victim / "kept").write_text(SECRET)
        entries = [path for path in run_dir.rglob("*") if "tokenizer" not in path.name]
        name = draw.choice(list(MORE))
        path = run_dir / "run.lock" if name == "lock" else draw.choice(sorted(entries))
        what = CHANGES[draw.choice(list(CHANGES))](draw, path, victim)
        text = f"{path.relative_to(run_dir)}: {what}, {name}"
        yield Case(text, partial(kept, MORE[name], run_dir, victim), must_refuse=False)


def kept(command: Callable[[Path], None], run_dir: Path, victim: Path) -> None:
    """Run a command, which must write nothing elsewhere and show no file of elsewhere."""
    try:
        command(run_dir)
    finally:
        assert [path.name for path in victim.iterdir()] == ["kept"]
        assert (victim / "kept").read_text() == SECRET
        for page in run_dir.glob("*.html"):
            assert SECRET not in page.read_text(errors="replace")


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def link(draw: Random, path: Path, victim: Path) -> str:
    """Put a link to something of somebody else, or to nothing, in its place."""
    remove(path)
    targets = (victim, victim / "kept", victim / "new", "/dev/zero", path, "/proc/self/mem")
    target = draw.choice(targets)
    path.symlink_to(target)
    return f"a link to {target}"


def special(draw: Random, path: Path, _: Path) -> str:
    """Put a pipe, a folder or a file in its place."""
    was_folder = path.is_dir()
    remove(path)
    if draw.random() < 0.5:
        os.mkfifo(path)
        return "a pipe"
    path.write_bytes(b"") if was_folder else path.mkdir()
    return "a file" if was_folder else "a folder"


def moved(_: Random, path: Path, __: Path) -> str:
    """Move it elsewhere, with a link to there in its place."""
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")
    return "a link to itself, elsewhere"


def lie(draw: Random, path: Path, victim: Path) -> str:
    """Change what a manifest, result, configuration or lock says."""
    run_dir = victim.parent / "run"
    match draw.choice(["manifest", "result", "lock", "config", "names"]):
        case "manifest":
            return mutate_json(draw, run_dir / "sft/manifest.json")
        case "result":
            return mutate_json(draw, run_dir / "sft/result.json")
        case "lock":
            (run_dir / "run.lock").write_text(draw.choice(LOCKS), encoding="latin-1")
            return "another lock"
        case "config":
            file = run_dir / "config.yaml"
            config = yaml.safe_load(file.read_text())
            key = draw.choice(list(config))
            config[key] = draw.choice([None, HOSTILE, [], {}, 10**400, [[1]], {HOSTILE: 1}, -1, ""])
            file.write_text(yaml.safe_dump(config))
            return f"{key} is {str(config[key])[:20]!r}"
        case _:
            (
                run_dir / draw.choice(["sft", "ppo", "."]) / draw.choice(["a\x1b[2J", "x" * 255])
            ).mkdir()
            return "an entry with a hostile name"


CHANGES: dict[str, Callable[[Random, Path, Path], str]] = {
    each.__name__: each for each in (link, special, moved, lie)
}
