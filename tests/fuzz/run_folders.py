"""Run folders of somebody else, or of a failing drive: one entry is damaged or something else."""

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
from hydra import compose
from rich.console import Console

from rlhf import export
from rlhf.chat import __main__ as chat
from rlhf.compare.preference_file import make_pairs, read_models_of_runs
from rlhf.config import run_dir as run_dirs
from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config, write_command, write_frozen_config
from rlhf.config.hydra_parts import composing
from rlhf.evaluate import __main__ as evaluate
from rlhf.models.build import build_actor, build_scorer
from rlhf.report import __main__ as report
from rlhf.report.compare_runs import print_comparison
from rlhf.run.finished_phase import finish_phase
from rlhf.run.model_card import origin_sections, results_section
from rlhf.run.results import write_json
from rlhf.watch.__main__ import build_draw_function
from tests.fuzz.case import Case, refused_by
from tests.fuzz.command_words import SECRET, launched
from tests.fuzz.mutations import VALUES, mutate, mutate_kind
from tests.models_on_disk import small_tokenizer, source_of
from tests.runs import ROOT
from tests.watch.watched import PLAN, RESULT, alarm, append, ppo_lines, sample, sft_lines

PLANNED = ["experiment=smoke", "hardware.dtype=fp32", "phase=reward", "plan=only"]
HOSTILE = "\x1b]0;PWN\x07\x1b[2J</script><b>"


@cache
def genuine() -> Path:
    """Make the folder of a run that has finished SFT, without training."""
    run_dir = Path(tempfile.mkdtemp(prefix="rlhf-fuzz-")) / "run"
    run_dir.mkdir()
    words = ["experiment=smoke", "hardware=cpu", "hardware.dtype=fp32", "data.size=200"]
    with composing(ROOT / "conf"):
        write_frozen_config(to_run_config(compose("config", words)), run_dir)
    write_command(words, run_dir)
    write_json(run_dir / "plan.json", PLAN)
    model = build_actor(source_of("llama"), small_tokenizer(), seed=1)
    scorer = build_scorer(source_of("llama"), small_tokenizer(), seed=2).pretrained
    for place in ("sft/model", "ppo/actor"):
        model.save_pretrained(run_dir / place)
    scorer.save_pretrained(run_dir / "reward/model")
    for place in ("sft/model", "ppo/actor", "reward/model", "tokenizer"):
        small_tokenizer().save_pretrained(run_dir / place)
    append(run_dir / "metrics.jsonl", [*sft_lines(range(1, 4)), *ppo_lines([1])])
    append(run_dir / "samples.jsonl", [sample(step, "A cat.") for step in (0, 1)])
    append(run_dir / "alarms.jsonl", [alarm(1)])
    result = {"perplexity_before": 9.0, "perplexity_after": 2.0, "seconds": 1.0}
    finish_phase(run_dir, Phase.sft, result | {"measured": {"hours": 0.1}})
    write_json(run_dir / "result.json", RESULT)
    (run_dir / "run.lock").write_text("process 1 on host\n")
    return run_dir


def instrument(main: Callable[[Sequence[str]], int], run_dir: Path, *words: str) -> None:
    """Give a run to an instrument, with a line of a dialogue; raise what it refused."""
    sys.stdin = io.StringIO("hi\n")
    refused_by(partial(main, [str(run_dir), *words]))


def watch(run_dir: Path) -> None:
    """Draw the screen of ``rlhf.watch --terminal``."""
    file = io.StringIO()
    Console(file=file, width=80, height=24).print(build_draw_function(run_dir)())
    assert not {"\x1b", "\x07"} & {*file.getvalue()}
    assert SECRET not in file.getvalue()


def lock(run_dir: Path) -> None:
    """Lock the run, as every command that writes does."""
    run_dirs.WAIT_SECONDS = 0.0
    with run_dirs.lock_run_dir(run_dir):
        pass


COMMANDS: dict[str, Callable[[Path], object]] = {
    "resume": lambda run: launched([f"resume={run}", "launcher.dry_run=true"], run.parent),
    "from_run": lambda run: launched([*PLANNED, f"from_run={run}"], run.parent),
    "report": lambda run: instrument(report.main, run),
    "chat": lambda run: instrument(chat.main, run),
    "evaluate": lambda run: instrument(evaluate.main, run, "--samples", "1"),
    "export": lambda run: instrument(export.main, run, "--out", f"{run.parent}/exported"),
    "compare": lambda run: print_comparison([run, genuine()]),
    "pairs": lambda run: make_pairs(*read_models_of_runs(run, None), seed=0),
    "model card": lambda run: (origin_sections(run, rows={}), results_section(run)),
    "watch": watch,
    "lock": lock,
}


def cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield run folders of which one entry is changed; one command reads each."""
    while True:
        run_dir, victim = shutil.copytree(genuine(), folder / "run"), folder / "victim"
        victim.mkdir()
        (victim / "kept").write_text(SECRET)
        entries = [path for path in run_dir.rglob("*") if "tokenizer" not in path.name]
        name = draw.choice(list(COMMANDS))
        path = run_dir / "run.lock" if name == "lock" else draw.choice(sorted(entries))
        what = draw.choice([link, damage, damage, lie])(draw, path, victim)
        text = f"{path.relative_to(run_dir)}: {what}, {name}"
        yield Case(text, partial(kept, COMMANDS[name], run_dir, victim), must_refuse=False)


def kept(command: Callable[[Path], object], run_dir: Path, victim: Path) -> None:
    """Run a command, which must write nothing elsewhere and show no file of elsewhere."""
    os.chdir(run_dir.parent)
    os.environ["RLHF_KEY"] = SECRET
    try:
        command(run_dir)
    finally:
        assert [path.name for path in victim.iterdir()] == ["kept"]
        assert (victim / "kept").read_text() == SECRET
        for page in run_dir.glob("*.html"):
            assert SECRET not in page.read_text(errors="replace")


def link(draw: Random, path: Path, victim: Path) -> str:
    """Put a link to something of somebody else, or to nothing, in its place."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    targets = (victim, victim / "kept", victim / "new", "/dev/zero", path, "/proc/self/mem")
    target = draw.choice(targets)
    path.symlink_to(target)
    return f"a link to {target}"


def damage(draw: Random, path: Path, _: Path) -> str:
    """Damage the content of a file, or its kind; make a folder a file."""
    if not path.is_dir():
        return mutate(draw, path)
    shutil.rmtree(path)
    path.write_bytes(b"")
    return mutate_kind(draw, path)


def lie(draw: Random, path: Path, victim: Path) -> str:
    """Change what the configuration or the lock says, or add an entry with a hostile name."""
    run_dir = victim.parent / "run"
    match draw.choice(["lock", "config", "text", "names"]):
        case "lock":
            locks = (f"process {'9' * 5000} on host\n", "process -1 on \x1b[2J\n", "\xff" * 99)
            (run_dir / "run.lock").write_text(draw.choice(locks), encoding="latin-1")
            return "another lock"
        case "config":
            file = run_dir / "config.yaml"
            config = yaml.safe_load(file.read_text())
            key = draw.choice(list(config))
            config[key] = draw.choice([*VALUES, HOSTILE, {HOSTILE: 1}, "${oc.env:RLHF_KEY}"])
            file.write_text(yaml.safe_dump(config))
            return f"{key} is {str(config[key])[:20]!r}"
        case "text":
            more = [b'\nzz: "$\\u007Boc.env:RLHF_KEY}"\n', b"\nzz: !!python/object/apply:os.x []\n"]
            more += [b"\nzz: &z [*z]\n", b"\0" * 1000, b"[" * 100_000, b"x" * 3_000_000]
            name = draw.choice(["config.yaml", "command.txt", "result.json", "metrics.jsonl"])
            with (run_dir / name).open("ab") as stream:
                stream.write(draw.choice(more))
            return f"more text in {name}"
        case _:
            name = draw.choice(["a\x1b[2J", "x" * 255])
            (run_dir / draw.choice(["sft", "ppo", "."]) / name).mkdir()
            return "an entry with a hostile name"
