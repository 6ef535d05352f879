"""Run folders of an attacker for every command that opens one: ``-m tests.fuzz.foreign_runs``.

The attacker has changed a finished run and made its hashes fit. No command may write elsewhere,
send a request, print or send a variable or a file of the reader, end with a traceback, or hang.
"""

import argparse
import io
import json
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from random import Random

import huggingface_hub.constants
import torch
import yaml

from rlhf import export, replay
from rlhf.base.types import TensorSlice
from rlhf.chat import __main__ as chat
from rlhf.compare.preference_file import make_pairs, read_models_of_runs
from rlhf.evaluate import __main__ as evaluate
from rlhf.report import __main__ as report
from rlhf.run.phase_state import checkpoint_folder, write_checkpoint
from rlhf.runs import __main__ as runs
from rlhf_lab import bundle, verify
from tests.cheats import copy_run, edit_json, forge_hashes
from tests.fork_server import MODULES
from tests.fuzz.case import Case, Verdict, judged, refused_by, report_faults
from tests.fuzz.command_words import launched
from tests.fuzz.run_folders import PLANNED, watch
from tests.quick_hydra import compose_once, compose_quickly

VARIABLES = {"PLAIN_VARIABLE": "zz-plain-value", "AWS_SECRET_ACCESS_KEY": "zz-secret-value-9"}
SECRET = "zz-line-of-a-file"
STEP = 1
LARGEST_FILE = 1 << 26  # bytes; with a fault, a copy of /dev/zero would fill the drive
SECONDS = 90.0  # after which a command hangs; an evaluation takes seconds
DEEP = "[" * 50_000
BOMB = (
    "[&a [x], "
    + ", ".join(f"&{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in pairwise("abcdefg"))
    + "]"
)
HOSTILE = "\x1b]0;PWN\x07\x1b[2J"
NAMES = [BOMB, "&a [*a]", "2020-13-45", "2020-01-05", "9" * 6000, "!!binary aGk=", "!!set {a}"]
NAMES += ['"\\0"', "${oc.env:PLAIN_VARIABLE}", DEEP, ".nan", "{a: {b: c}}", '"\\e[2J"', "[", "''"]


def make_base(run: Path, folder: Path) -> Path:
    """Copy a finished run, add a checkpoint to it, and make its configuration an attacker's."""
    copied = copy_run(run, folder / "base")
    sizes = {path.name: path.stat().st_size for path in copied.glob("*.jsonl")}
    write_checkpoint(copied / "ppo", STEP, streams(), {"logs": sizes}, wanted_bytes=0)
    with (copied / "config.yaml").open("a") as file:
        file.write("# from elsewhere\n")
    forge_hashes(copied)
    return copied


def streams() -> dict[str, list[TensorSlice]]:
    """Return the tensors of a checkpoint."""
    return {"actor": [("weight", 0, torch.ones(1))]}


# What an attacker changes: each returns what it was.


def link(draw: Random, run: Path, home: Path) -> str:
    """Put a link in the place of a file or folder, or beside it."""
    entries = [each for each in run.rglob("*") if not each.is_symlink()]
    path = draw.choice(sorted(entries))
    if draw.random() < 0.3:
        path = draw.choice([run / "tokenizer", run / "ppo/actor", run / "sft", run]) / "added"
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    name = draw.choice(["secret", "new", "mine", "pipe", ".", "/dev/zero", "/proc/kmsg", "itself"])
    if name == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if name == "itself" else home / name)
    return f"{path.relative_to(run)} is {name}"


def link_state(draw: Random, run: Path, home: Path) -> str:
    """Let a phase, its checkpoints or one checkpoint be those of a run of the reader."""
    place = draw.choice(["ppo", "ppo/state", f"ppo/state/{checkpoint_folder(run, STEP).name}"])
    shutil.rmtree(run / place)
    (run / place).symlink_to(home / "mine" / place)
    return f"{place} is a link to a run of the reader"


def escape_from_logs(draw: Random, run: Path, home: Path) -> str:
    """Name other files in the checkpoint's list of logs, or sizes that are none."""
    folder = checkpoint_folder(run / "ppo", STEP)
    (run / "deep").mkdir()
    (run / "deep/profile").write_text("stolen\n")
    names = [
        "../home/profile",
        str(home / "profile"),
        "deep/profile",
        "metrics.jsonl/../../home/new",
    ]
    logs = {draw.choice(names): draw.choice([0, 9, 10_000])}
    logs = draw.choice([logs, logs, {"metrics.jsonl": draw.choice([-5, "x", None, 10**70])}, 5])
    shutil.rmtree(folder)
    write_checkpoint(run / "ppo", STEP, streams(), {"logs": logs}, wanted_bytes=0)
    return f"logs {logs}"


def escape_from_lists(draw: Random, run: Path, home: Path) -> str:
    """Name other files, or something else than files, in a list of files."""
    name = draw.choice(
        ["../home/secret", str(home / "secret"), "/proc/kmsg", "/dev/zero", "\0", "x"]
    )
    identity = draw.choice([[9, "00"], [], [0, "00"], "x", None])
    way = draw.choice(["files", "lines", "attempts", "inputs", "records", "reused", "bundle"])
    phase = draw.choice(["sft", "reward", "ppo"])
    match way:
        case "files":
            edit_json(run / phase / "manifest.json", lambda m: m["files"].update({name: identity}))
        case "lines":
            edit_json(run / phase / "manifest.json", lambda m: m["lines"].update({name: "00 11"}))
        case "attempts":
            edit_json(
                run / "attempts.json", lambda a: a["attempts"][-1]["files"].update({name: "0"})
            )
        case "inputs":
            (run / "inputs.json").write_text(json.dumps({"data.path": {name: identity}}))
        case "records":
            edit_json(run / "result.json", lambda r: r["records"].update({name: "00"}))
        case "reused":
            edit_json(run / phase / "result.json", lambda r: r.update(reused_from=name))
            edit_json(run / "result.json", lambda r: r["phases"][phase].update(reused_from=name))
        case "bundle":
            about = {"run": name, "started": 1e12, "state": HOSTILE, "reason": HOSTILE}
            about |= {"files": {name: identity}, "changed": {name: [1, "00"]}}
            (run / "bundle.json").write_text(json.dumps(about))
    return f"{way} of {phase}: {name!r} {identity}"


def bomb(draw: Random, run: Path, home: Path) -> str:
    """Write a value that is too large, too deep, or of no plain kind."""
    way = draw.choice(["name", "name", "name", "from_run", "line", "result", "more", "objects"])
    if way in ("name", "from_run"):
        text, value = (run / "config.yaml").read_text(), draw.choice(NAMES)
        lines = [
            f"{way}: {value}" if line.startswith(f"{way}:") else line for line in text.split("\n")
        ]
        (run / "config.yaml").write_text("\n".join(lines))
        return f"{way}: {value[:30]}"
    if way == "line":
        name = draw.choice(["metrics.jsonl", "alarms.jsonl", "samples.jsonl"])
        line = draw.choice([DEEP, '{"phase": [[1]], "step": {}}', "9" * 5000, '"\\ud800"', "1e999"])
        with (run / name).open("a") as file:
            file.write(line + draw.choice(["\n", ""]))
        return f"{name}: {line[:30]}"
    if way == "result":
        value = draw.choice([[1.0], [], [1.0, 2.0, 3.0], "x", {"y": [1]}, 10**80, None])
        key = draw.choice(
            ["gold_gain_ci", "judge_gains", "score_parts_after", "steps", "gold_after"]
        )
        edit_json(run / "result.json", lambda found: found["phases"]["ppo"].update({key: value}))
        return f"{key}={value}"
    name = draw.choice(["config.yaml", "command.txt", "result.json", "plan.json", "metrics.jsonl"])
    if way == "objects":
        content = draw.choice(["{}", "[]", "null", '{"phases": {}}', '{"attempts": 5}', "\0", ""])
        (run / name).write_text(content)
        return f"{name}: {content!r}"
    with (run / name).open("a") as file:
        file.write(draw.choice([DEEP, "x" * 2_000_000, "\0" * 1000, "\nzz: !!python/name:os []\n"]))
    return f"more in {name}"


def reach(draw: Random, run: Path, home: Path) -> str:
    """Name addresses, variables, modules, hub ids and files of the reader in the configuration."""
    url, variable = f"http://127.0.0.1:{os.environ['LISTENER']}/v1", draw.choice(list(VARIABLES))
    part = {"weight": 1.0, "url": url, "token_variable": variable, "timeout_seconds": 5.0}
    rubric = {"rubric": str(home / "secret"), "model": "m"}
    changes: list[dict[str, object]] = [
        {"rewards": {"m": {"kind": "model"}, "h": {"kind": "http", **part}}},
        {"rewards": {"m": {"kind": "model"}, "j": {"kind": "judge", **part, **rubric}}},
        {"rewards": {"m": {"kind": "model"}, HOSTILE: {"kind": "http", **part}}},
        {"rewards": {"f": {"kind": "function", "function": "evil:f", "run_code": True}}},
        {"data": {"source": "hub", "path": "evil/data"}},
        {"data": {"source": "local", "path": str(home / "secret"), "eval_path": "evil/data"}},
        {"data": {"path": None, "source": "local", "sets": {HOSTILE: {"path": str(home)}}}},
        {"data": {"cache_dir": str(home / "new")}},
        {"model": {"init": "pretrained", "path": "evil/model", "tokenizer": "evil/model"}},
        {"reward_model": {"init": "pretrained", "path": "evil/model"}},
        {"ppo": {"teacher_path": "evil/model"}},
        {"reward": {"groups_path": str(home / "pipe")}},
        {"environment": {"kind": "gymnasium", "id": "evil:Game-v0"}},
        {"environment": {"kind": "custom", "target": "evil:E", "run_code": True}},
        {"rollout": {"backend": "vllm", "server": {"url": url}}},
        {"tracking": {"others": ["evil:Tracker"]}},
        {"launcher": {"hostfile": str(home / "pipe"), "master_addr": "127.0.0.1"}},
        {"run_dir": str(home / "mine"), "resume": str(home / "mine")},
        {"from_run": str(home / "mine")},
    ]
    if draw.random() < 0.2:
        place = draw.choice(["sft/model", "ppo/actor", "reward/model"])
        adapter = {"base_model_name_or_path": "evil/base", "peft_type": "LORA", "r": 1}
        (run / place / "adapter_config.json").write_text(json.dumps(adapter))
        return f"an adapter in {place}"
    if draw.random() < 0.2:
        words = ["name=${oc.env:PLAIN_VARIABLE}", "hydra.searchpath=[/]", f"--config-dir={home}"]
        words += [f"from_run={home}/mine", f"data=local data.path={home}/secret", f"{HOSTILE}=1"]
        with (run / "command.txt").open("a") as file:
            file.write(f" '{draw.choice(words)}'\n")
        return "another command"
    config, change = yaml.safe_load((run / "config.yaml").read_text()), draw.choice(changes)
    for key, value in change.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return str(change)[:150]


def name_files(draw: Random, run: Path, home: Path) -> str:
    """Add entries with hostile names, or lines of hostile phases."""
    name = draw.choice([HOSTILE, "a\nb", "x" * 255, "step-abc", "step-٣", ".hidden", "-rf"])
    place = draw.choice(["sft", "ppo", "ppo/state", ".", "tokenizer", "ppo/actor"])
    if draw.random() < 0.3:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"phase": name, "step": 1, HOSTILE: 1.0}) + "\n")
        return f"a line of the phase {name!r}"
    (run / place / name).mkdir()
    return f"{place}/{name!r}"


ATTACKS = [
    link,
    link,
    link_state,
    escape_from_logs,
    escape_from_lists,
    bomb,
    reach,
    reach,
    name_files,
]


def instrument(main: Callable[[list[str]], int], *words: object) -> None:
    """Start a command in this process; raise what it printed if it refused the run."""
    sys.stdin = io.StringIO("hi\n")

    def started() -> int:
        code = main([str(word) for word in words])
        return 0 if code == verify.DIFFERS else code

    refused_by(started)


COMMANDS: dict[str, Callable[[Path], object]] = {
    "list": lambda run: instrument(runs.main, run.parent),
    "list --json": lambda run: instrument(runs.main, run.parent, "--json"),
    "list by name": lambda run: instrument(runs.main, run.parent, "name=*", "--sort", "name"),
    "tree": lambda run: instrument(runs.main, "tree", run.parent),
    "diff": lambda run: instrument(runs.main, "diff", run, run.parents[1] / "home/mine"),
    "clean": lambda run: instrument(runs.main, "clean", run.parent, "--remove"),
    "verify": lambda run: instrument(verify.main, run, "--replay", "none"),
    "verify --json": lambda run: instrument(verify.main, run, "--replay", "none", "--json"),
    "replay": lambda run: instrument(replay.main, run, "--phase", "ppo", "--step", STEP + 1),
    "report": lambda run: instrument(report.main, run),
    "report A B": lambda run: instrument(report.main, run, run.parents[1] / "home/mine"),
    "chat": lambda run: instrument(chat.main, run, "--max-tokens", 2),
    "chat --environment": lambda run: instrument(chat.main, run, "--environment"),
    "evaluate": lambda run: instrument(evaluate.main, run, "--prompts", 2),
    "export": lambda run: instrument(export.main, run, "--out", run.parent / "out"),
    "export --checkpoint": lambda run: instrument(
        export.main, run, "--checkpoint", STEP, "--out", run.parent / "out"
    ),
    "bundle": lambda run: instrument(bundle.main, run, run.parent / "run.zip"),
    "pairs": lambda run: make_pairs(*read_models_of_runs(run, None), seed=0),
    "watch": watch,
    "resume": lambda run: launched([f"resume={run}", "plan=off"], run.parent),
    "from_run": lambda run: launched([*PLANNED, f"from_run={run}"], run.parent),
}


def cases(seed: int, base: Path, folder: Path) -> Iterator[Case]:
    """Yield runs of an attacker, each given to one command; every command gets the next in turn."""
    names = list(COMMANDS)
    for number in range(sys.maxsize):
        draw, here = Random(f"{seed} {number}"), folder / str(number)
        run, home = copy_run(base, here / "runs/run"), here / "home"
        make_home(home, base)
        attack, name = draw.choice(ATTACKS), names[number % len(names)]
        what = attack(draw, run, home)
        if attack in (reach, escape_from_logs, name_files) and draw.random() < 0.8:
            forge_hashes(run)
        text = f"{number}, {name}: {attack.__name__}: {what}"
        yield Case(text, partial(act, COMMANDS[name], run, home), must_refuse=False)


def make_home(home: Path, base: Path) -> None:
    """Make files of the reader: a secret, a profile, a module, a pipe, and a run."""
    home.mkdir()
    (home / "secret").write_text(json.dumps({"phase": "ppo", "step": 1, "text": SECRET}) + "\n")
    (home / "profile").write_text("export PATH\n")
    (home / "evil.py").write_text(f"open({str(home / 'ran')!r}, 'w').close()\n")
    os.mkfifo(home / "pipe")
    copy_run(base, home / "mine")


def act(command: Callable[[Path], object], run: Path, home: Path) -> None:
    """Give a run to a command, and check what the command did elsewhere."""
    said = home.parent / "said"
    for descriptor in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    os.chdir(run.parent)
    os.environ.update(VARIABLES, PYTHONPATH=str(home), HOME=str(home.parent))
    os.environ.pop("HF_HUB_OFFLINE", None)
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    sys.path.append(str(home))
    requests: list[object] = []

    def connect(channel: socket.socket, address: object) -> None:
        if channel.family != socket.AF_UNIX:
            requests.append(address)
        raise ConnectionRefusedError(address)

    socket.socket.connect = connect  # type: ignore[method-assign, assignment]
    replay.resume_to_end_step = lambda *_: None  # the copy is what is tried
    before, text = contents(home), io.StringIO()
    sys.stdout = text
    try:
        command(run)
    except Exception as error:
        text.write(str(error))
        raise
    finally:
        printed = said.read_text(errors="replace") + text.getvalue()
        assert not requests, requests
        assert contents(home) == before
        assert {each.name for each in home.parent.iterdir()} <= {"home", "runs", "said", ".cache"}
        assert not [*run.parent.glob(".replay-*")]
        assert not [each for each in (SECRET, *VARIABLES.values()) if each in printed], printed
        assert "Traceback" not in printed, printed
        assert not {"\x1b", "\x07"} & {*printed}, printed


def contents(folder: Path) -> dict[str, object]:
    """Return what the files in a folder hold."""
    return {
        str(path): path.read_bytes() if path.is_file() else path.lstat().st_mode
        for path in folder.rglob("*")
    }


def find_faults(
    seed: int, count: int, run: Path, folder: Path
) -> Iterator[tuple[Case, Verdict, str]]:
    """Yield every case with its verdict; a connection to this process's socket is a fault."""
    for module in MODULES:  # once, instead of in each forked process
        import_module(module)
    base, listener = make_base(run, folder), socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    os.environ["LISTENER"] = str(listener.getsockname()[1])
    for case, _ in zip(cases(seed, base, folder), range(count), strict=False):
        verdict, text = judged(case, seconds=SECONDS)
        shutil.rmtree(folder / case.name.partition(",")[0])
        try:
            listener.accept()
        except BlockingIOError:
            yield case, verdict, text
        else:
            yield case, Verdict.silent, "it sent a request"
    listener.close()


def main() -> int:
    """Try the runs; return 1 if there was a fault."""
    from tests.runs import finished

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = finished(Path(folder, "finished"))
        compose_quickly()
        compose_once()
        return report_faults(find_faults(options.seed, options.cases, run, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
