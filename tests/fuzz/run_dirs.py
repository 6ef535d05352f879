"""Run directories of somebody else, or of a failing drive: a file of a genuine run is damaged."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

from rlhf.base.errors import RlhfError
from rlhf.base.stored_files import RESULT, read_json
from rlhf.chat.run_models import RunModels
from rlhf.compare.preference_file import make_pairs, read_models_of_runs
from rlhf.config.freeze import load_run
from rlhf.evaluate.__main__ import compute_figures
from rlhf.evaluate.answer_rows import policy_folders
from rlhf.export import export_final
from rlhf.options.phase_store.phase_store import PhaseStore
from rlhf.report.compare_runs import compare
from rlhf.report.run_page import EVALUATION, write_report
from rlhf.report.summary import print_summary
from rlhf.run.console import Console
from rlhf.run.jsonl import LOGS, drop_lines_of_phases
from rlhf.run.model_card import origin_sections, results_section
from rlhf.run.phase_state import find_latest_intact_checkpoint
from rlhf.run.results import read_plan, write_json
from rlhf.run.trackers import build_tracker
from rlhf.run.wandb_run import _read_or_create_run_id
from rlhf.runtime.phase_runs import build_run_result, unfinished_phases
from tests.fuzz.case import Case
from tests.runs import finished

SECRET = "zzsecretzz"
VALUES: tuple[Any, ...] = (
    *(None, True, [], {}, [1], {"a": 1}, "text", "", -1, 0, 1.5, 10**20, 10**400, 1e308, -1e-320),
    *(float("nan"), float("inf"), "${oc.env:RLHF_KEY}", "\x1b[2J</script><b>", "\ud83d", [[[[]]]]),
)


@cache
def genuine() -> Path:
    """Train the smallest run, and add the files that only some runs have."""
    run_dir = Path(tempfile.mkdtemp(prefix="genuine-")) / "run"
    words = ["checkpoint.every_steps=1", "checkpoint.keep_finished=true"]
    words += ["checkpoint.digest_every=1"]
    words += [f"ppo.critic_check.{word}" for word in ("every=1", "states=4", "branches=2")]
    finished(run_dir, *words)
    samples = (run_dir / "samples.jsonl").read_text().splitlines()
    alarm = {"name": "clipping", "metric": "ppo/clipfrac", "value": 0.5, "advice": "Lower it."}
    line = json.dumps({"phase": "ppo", "step": 1} | alarm)
    (run_dir / "alarms.jsonl").write_text(f"{line}\n{line}\n")
    (run_dir / "wandb_id").write_text("0123456789abcdef\n")
    folder = (run_dir / EVALUATION).parent
    folder.mkdir()
    rows = [
        {name: json.loads(sample)[name] for name in ("prompt", "response", "score", "kl")}
        | {"model": model, "decoder": decoder, "sample": 0, "tokens": 8.0, "ended": 1.0}
        | {"gold/gold": 0.5, "right": None}
        for model in ("sft", "actor")
        for decoder in ("greedy", "sampled")
        for sample in samples[:3]
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "pairs.jsonl").write_text('{"margin": 0.5}\n{"margin": -0.5}\n')
    write_json(run_dir / EVALUATION, compute_figures(run_dir, {"sft": 2.5}))
    return run_dir


FILES = (
    *("config.yaml", "command.txt", "plan.json", "result.json", "wandb_id", *LOGS),
    *(f"{phase}/result.json" for phase in ("sft", "reward", "ppo")),
    *("ppo/held_out.json", "evaluation/evaluation.json"),
    *("evaluation/answers.jsonl", "evaluation/pairs.jsonl"),
    *(f"ppo/state/step-00000002/{name}" for name in ("state.json", "manifest.json")),
    *("ppo/actor/README.md", "sft/manifest.json"),
)


def ignore(_: str) -> None:
    """Print nothing."""


def resume(run_dir: Path, _: Path) -> None:
    """Read what a resumed run reads."""
    config = load_run(run_dir)
    read_plan(run_dir, ignore)
    unfinished = unfinished_phases(config, run_dir)
    for phase in config.phase.order:
        find_latest_intact_checkpoint(run_dir / phase, ignore)
    for name in LOGS:
        drop_lines_of_phases(run_dir / name, {"ppo"})
    build_tracker(config, run_dir, is_main=True, say=ignore).finish()
    _read_or_create_run_id(run_dir / "wandb_id")
    if not unfinished:
        build_run_result(config, run_dir, [])


def page(run_dir: Path, _: Path) -> None:
    """Write the report, which must not show the environment."""
    write_report(run_dir)
    assert SECRET not in (run_dir / "report.html").read_text(encoding="utf-8")


def summary(run_dir: Path, _: Path) -> None:
    """Print the summary of a finished run."""
    result = read_json(run_dir / "result.json", RESULT)
    if result is not None:
        print_summary(Console(log_every=1, file=StringIO()), result, run_dir)


def chat(run_dir: Path, _: Path) -> None:
    """Choose the model to chat with."""
    models = RunModels(run_dir, None)
    assert models.sampling.max_tokens


def evaluation(run_dir: Path, _: Path) -> None:
    """Find the models to evaluate; the rows are read by the process that has just written them."""
    load_run(run_dir)
    policy_folders(run_dir)


def store(run_dir: Path, folder: Path) -> None:
    """List a store whose only entry is the run."""
    (folder / "store").mkdir()
    run_dir.rename(folder / "store" / "0123456789abcdef")
    PhaseStore(folder / "store", max_gib=1).entries()


Door = Callable[[Path, Path], object]
DOORS: tuple[Door, ...] = (
    *(page, summary, chat, evaluation),
    lambda run_dir, _: compare([run_dir, genuine()]),
    lambda run_dir, _: compare([run_dir.parent]),
    lambda run_dir, folder: export_final(run_dir, folder / "exported"),
    lambda run_dir, _: make_pairs(*read_models_of_runs(run_dir, None), seed=0),
    lambda run_dir, _: (origin_sections(run_dir, rows={}), results_section(run_dir)),
    *(resume, store),
)


def cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield damaged run directories; several commands that read such directories get each."""
    while True:
        run_dir = folder / f"{draw.random()}" / "run"
        shutil.copytree(genuine(), run_dir, copy_function=os.link)
        name, damage = draw.choice(FILES), draw.choice(DAMAGES)
        path = run_dir / name
        content = path.read_bytes()
        path.unlink()
        what = damage(draw, path, content)
        yield Case(
            f"{name}: {damage.__name__} {what}",
            partial(read_by, draw.sample(DOORS, 4), run_dir),
            must_refuse=False,
        )


def read_by(doors: Sequence[Door], run_dir: Path) -> None:
    """Give a run directory to several commands; raise the last refusal."""
    os.environ["RLHF_KEY"] = SECRET
    refusal = None
    for door in doors:
        try:
            door(run_dir, run_dir.parent)
        except RlhfError as error:
            refusal = error
    if refusal is not None:
        raise refusal


def _changed(draw: Random, content: Any) -> Any:
    """Return JSON content with one value changed, removed, renamed or repeated."""
    if not isinstance(content, dict | list) or not content or draw.random() < 0.05:
        return draw.choice(VALUES)
    is_map = isinstance(content, dict)
    key: Any = draw.choice(list(content)) if is_map else draw.randrange(len(content))
    changed: Any = dict(content) if is_map else list(content)
    if isinstance(content[key], dict | list) and draw.random() < 0.7:
        changed[key] = _changed(draw, content[key])
        return changed
    match draw.randrange(4):
        case 0:
            del changed[key]
        case 1 if is_map:
            changed[draw.choice(("", "x", "phase", "ppo/score_mean", "a_before", "b_ci"))] = (
                changed.pop(key)
            )
        case _:
            changed[key] = draw.choice(VALUES)
    return changed


def values(draw: Random, path: Path, content: bytes) -> str:
    """Change values of JSON or YAML; other files become JSON."""
    if path.suffix == ".yaml":
        import yaml

        text = yaml.safe_dump(_changed(draw, yaml.safe_load(content)), allow_unicode=True)
    else:
        lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
        if not lines:
            return ""
        at = draw.randrange(len(lines))
        try:
            lines[at] = json.dumps(_changed(draw, json.loads(lines[at])), indent=None)
        except ValueError:
            lines[at] = json.dumps(draw.choice(VALUES))
        text = "\n".join(lines) + "\n"
    path.write_bytes(text.encode("utf-8", errors="backslashreplace"))
    return ""


def bytes_(draw: Random, path: Path, content: bytes) -> str:
    """Flip, cut or repeat bytes."""
    changed = bytearray(content or b"x")
    match draw.randrange(4):
        case 0:
            del changed[draw.randrange(len(changed)) :]
        case 1:
            for _ in range(draw.randint(1, 20)):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
        case 2:
            changed *= 2
        case _:
            changed = bytearray(draw.randbytes(draw.randrange(400)))
    path.write_bytes(changed)
    return ""


def text(draw: Random, path: Path, content: bytes) -> str:
    """Replace the file by a text that parsers dislike."""
    texts = {
        "deep": b"[" * 100_000,
        "deep objects": b'{"a":' * 50_000,
        "digits": b'{"seed": ' + b"1" * 5000 + b"}",
        "nul": b"\0" * 1000,
        "UTF-16": content.decode(errors="replace").encode("utf-16"),
        "interpolation": content + b'\nzz: "$\\u007Boc.env:RLHF_KEY}"\n',
        "tag": content + b"\nzz: !!python/object/apply:os.system [true]\n",
        "alias": content + b"\nzz: &z [*z]\n",
        "bomb": b"seed: &a [1, 1, 1]\n"
        + b"".join(b"k%d: &b%d [%s]\n" % (n, n, b"*a, " * 9) for n in range(99)),
        "quote": b"python launch.py 'a",
        "empty": b"",
        "long": b"x" * 3_000_000,
    }
    name = draw.choice(list(texts))
    path.write_bytes(texts[name])
    return name


def kind(draw: Random, path: Path, content: bytes) -> str:
    """Put something else in its place."""
    what = draw.choice(("nothing", "folder", "FIFO", "link", "loop", "dangling", "secret"))
    match what:
        case "folder":
            path.mkdir()
        case "FIFO":
            os.mkfifo(path)
        case "link":
            path.with_name("elsewhere").write_bytes(content)
            path.symlink_to("elsewhere")
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to("missing")
        case "secret":
            path.with_name("secret").write_text(SECRET)
            path.symlink_to("secret")
    return what


DAMAGES = (values, values, values, bytes_, text, kind)
