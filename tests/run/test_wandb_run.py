"""Weights & Biases for real: offline into a folder, and online where that cannot work.

Each run is a process of its own with an empty home: wandb reads credentials and settings but once.
Only the worker that runs these tests imports it, for seconds.
"""

import math
import os
import pty
import signal
import struct
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import yaml

from rlhf.config.choices import Source, WandbMode
from rlhf.config.freeze import to_run_config
from rlhf.run import wandb_run
from rlhf.run.tracker import Sample, Token, Tracker
from rlhf.run.trackers import FileTracker, IsolatedTracker, Trackers, build_tracker
from rlhf.run.wandb_run import (
    BLOCK,
    FILE_HEADER,
    FULL,
    HEADER,
    MOST_INCREMENTS,
    WandbTracker,
    cut_incomplete_records,
    read_wandb_history,
    read_wandb_records,
)
from tests.conftest import Compose
from tests.run.test_trackers import NO_ALARMS, run_config
from tests.run.wandb_server import WandbServer
from tests.runs import ROOT, TINY_RUN, launch, start

CODE = """
import sys
from pathlib import Path
from rlhf.base.errors import CapabilityError
from rlhf.config.choices import WandbMode
from rlhf.run import wandb_run
from rlhf.run.tracker import Sample
from tests.run.test_trackers import run_config

wandb_run.INIT_TIMEOUT_SECONDS = 1.0
wandb_run.INIT_ATTEMPTS = 2
config = run_config(WandbMode(sys.argv[1])).tracking
config.tags = ["tiny"]
try:
    tracker = wandb_run.WandbTracker(
        config,
        Path(sys.argv[2]),
        {"ppo": {"kl_ctl": 0.05}, "data": {"source": "local", "path": ["pets.jsonl"]}},
        name="monday",
        group="default",
        job_type="sft+ppo",
    )
except CapabilityError as error:
    sys.exit(f"CapabilityError: {error}")
tracker.log("sft", 1, {"sft/loss": 2.5})
tracker.log("ppo", 1, {"ppo/clipfrac": float("nan"), "time/step_seconds": 3.0})
tracker.samples("ppo", 1, [Sample("p", "r", True, 1.5, 0.25, [])], steps=1)
tracker.conclude({"objective": 0.5, "phases": {"ppo": {"gold_after": 0.25}}})
tracker.finish()
"""
KEY = "0123456789abcdef" * 3
WATCHED = ("ppo/clipfrac", "ppo/kl_to_reference", "ppo/reward_mean")
STEPS = 6


class Machine:
    """An empty home, in which trackers are run."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.run_dir = folder / "run"
        self.home.mkdir()
        self.run_dir.mkdir()

    def track(
        self,
        mode: str,
        *,
        stdin: int = subprocess.DEVNULL,
        stderr: int = subprocess.PIPE,
        **env: str,
    ) -> subprocess.CompletedProcess[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "NETRC"))}
        return subprocess.run(
            [sys.executable, "-c", CODE, mode, str(self.run_dir)],
            env=inherited | {"HOME": str(self.home)} | env,
            cwd=ROOT,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            timeout=60,  # a prompt would wait for ever
            check=False,
        )

    def records(self) -> list[bytes]:
        """What wandb keeps of each offline run."""
        return [p.read_bytes() for p in self.run_dir.glob("wandb/offline-run-*/run-*.wandb")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.slow
def test_offline_needs_no_account_and_prints_nothing(machine: Machine) -> None:
    actor = machine.run_dir / "ppo" / "actor"
    actor.mkdir(parents=True)
    (actor / "model.safetensors").write_bytes(b"weights")
    done = machine.track("offline")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (record,) = machine.records()
    for word in ("sft/loss", "sft/step", "ppo/*", "time/*", "speed/*", "monday", "tiny", "kl_ctl"):
        assert word.encode() in record, word
    run_id = (machine.run_dir / "wandb_id").read_text().strip()
    assert machine.track("offline", WANDB_API_KEY=KEY).returncode == 0
    assert (machine.run_dir / "wandb_id").read_text().strip() == run_id
    runs = list(machine.run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    assert [path.name for path in runs] == [f"run-{run_id}.wandb"] * 2
    (logged,) = [
        line for line in read_wandb_history(machine.run_dir) if "time/step_seconds" in line
    ]
    assert (logged["ppo/step"], logged["time/step_seconds"]) == (1, 3.0)
    actor = f"{run_id}-ppo-actor", ["ppo-actor/model.safetensors"]
    assert logged_models(runs[-1]) == [actor]
    (table,) = [line for line in read_wandb_history(machine.run_dir) if "ppo/samples/nrows" in line]
    assert table["ppo/step"] == 1
    found = [each.summary for each, _ in read_wandb_records(runs[-1]) if each.HasField("summary")]
    written = {"/".join(item.nested_key) or item.key for each in found for item in each.update}
    assert {"objective", "result/ppo/gold_after"} <= written
    for path in (*machine.run_dir.rglob("*"), *machine.home.rglob("*")):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), "the key is a secret"


def logged_models(path: Path) -> list[tuple[str, list[str]]]:
    """Name and entries of each model's artifact in a .wandb file."""
    found = [each.artifact for each, _ in read_wandb_records(path) if each.HasField("artifact")]
    return [(a.name, [e.path for e in a.manifest.contents]) for a in found if a.type == "model"]


@pytest.mark.slow
def test_online_without_a_key_says_the_ways_out_and_does_not_ask(machine: Machine) -> None:
    keyboard, terminal = pty.openpty()
    try:
        done = machine.track("online", stdin=terminal, stderr=terminal, TERM="xterm")
        assert done.returncode == 1
        said = os.read(keyboard, 10_000).decode()
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert "CapabilityError: tracking.wandb=online: no Weights & Biases credentials" in said
    for way_out in ("`wandb login`", "WANDB_API_KEY", "tracking=wandb_offline"):
        assert way_out in said
    assert not (machine.run_dir / "wandb_id").exists()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"WANDB_API_KEY": "short"}, "40+ characters"),
        ({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}, "tracking=wandb_offline"),
    ],
    ids=["malformed key", "server that does not answer"],
)
def test_what_wandb_refuses_ends_the_run_with_the_reason(
    given: dict[str, str], reason: str, machine: Machine
) -> None:
    done = machine.track("online", **given)
    assert done.returncode == 1
    assert "CapabilityError: tracking.wandb=online: Weights & Biases refused" in done.stderr
    assert reason in done.stderr
    assert KEY not in done.stderr


@pytest.mark.soak
def test_offline_run_that_was_killed_and_resumed_is_whole(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [*TINY_RUN, "tracking=wandb_offline", f"ppo.steps={STEPS}"]
    words += ["phase.order=[sft,ppo]", "model@reward_model=gold"]
    words += ["ppo.sample_every=2", "ppo.eval_prompts=8", f"run_dir={run_dir}"]
    process = start(ROOT / "launch.py", *words, cwd=tmp_path)
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or '"phase": "ppo", "step": 3' not in metrics.read_text():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    process.kill()
    process.communicate()
    run_id = (run_dir / "wandb_id").read_text().strip()
    resumed = launch(f"resume={run_dir}", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr

    files = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    assert [path.name for path in files] == [f"run-{run_id}.wandb"] * 2
    logged = read_wandb_history(run_dir)
    for name in WATCHED:
        steps = [line["ppo/step"] for line in logged if name in line]
        assert steps == list(range(1, STEPS + 1)), name
    evaluated = [line["ppo/step"] for line in logged if "ppo/eval_score" in line]
    assert evaluated == [0, STEPS]
    tables = [line for line in logged if "ppo/samples/nrows" in line]
    assert [line["ppo/step"] for line in tables] == [0, 2, 4, 6]


ATTEMPT = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
import wandb
from rlhf.config.choices import WandbMode
from rlhf.run.trackers import build_tracker
from tests.run.test_trackers import run_config

mode, run_dir, first, last, end = sys.argv[1:]
config = run_config(WandbMode(mode))
config.phase = SimpleNamespace(order=["ppo"])
config.data = {"source": "synthetic", "path": None, "sets": {}}
wandb.Run.use_artifact = lambda *_: None
tracker = build_tracker(config, Path(run_dir), is_main=True, say=print)
for step in range(int(first), int(last) + 1):
    tracker.log("ppo", step, {f"ppo/parts/{part}": float(step) for part in range(20)})
    tracker.append("rollouts.jsonl", "ppo", step, [{"score": 0.5}])
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
tracker.finish()
"""


def attempt(mode: str, server: WandbServer, run_dir: Path, *how: object) -> None:
    """Take steps of a run in a process, which is killed or finishes."""
    run_dir.mkdir(exist_ok=True)
    words = [sys.executable, "-c", ATTEMPT, mode, run_dir, *how]
    ended = subprocess.run(list(map(str, words)), env=environment(server), cwd=ROOT, check=False)
    assert ended.returncode == (-signal.SIGKILL if "killed" in how else 0)


def environment(server: WandbServer) -> dict[str, str]:
    quiet = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url, "WANDB_ERROR_REPORTING": "false"}
    return {**os.environ, **quiet}


def sent_steps(server: WandbServer) -> dict[str, list[int]]:
    """Steps of the rows of metrics and of histograms on the server."""
    (rows,) = server.rows.values()
    names = ("ppo/parts/0", "ppo/histograms/rollouts/score")
    return {name: [row["ppo/step"] for row in rows if name in row] for name in names}


@pytest.mark.slow
def test_wandb_sync_uploads_all_steps_of_killed_attempts_once(tmp_path: Path) -> None:
    with WandbServer().serving() as server:
        attempt("offline", server, tmp_path, 1, 40, "killed")
        attempt("offline", server, tmp_path, 41, 42, "killed")  # before its first record is written
        attempt("offline", server, tmp_path, 43, 45, "finishes")
        for _ in range(2):  # the second time there is nothing left to upload
            words = ["wandb", "sync", *sorted(tmp_path.glob("wandb/offline-run-*"))]
            command = [sys.executable, "-m", *map(str, words)]
            ended = subprocess.run(
                command,
                cwd=tmp_path,  # wandb writes its log below the working directory
                env=environment(server),
                capture_output=True,
                text=True,
                check=True,
            )
            assert "ERROR" not in ended.stderr
        found = sent_steps(server)
    assert [*found.values()] == [list(range(1, 46))] * 2


@pytest.mark.soak
def test_an_online_run_that_was_killed_and_resumed_is_whole(tmp_path: Path) -> None:
    with WandbServer().serving() as server:
        attempt("online", server, tmp_path, 1, 20, "finishes")
        attempt("online", server, tmp_path, 21, 40, "killed")
        attempt("online", server, tmp_path, 41, 50, "finishes")
        found = sent_steps(server)
    assert [*found.values()] == [list(range(1, 51))] * 2


class FakeRun:
    """A W&B run that remembers what was logged."""

    id = "a1"

    def __init__(self) -> None:
        self.logged: list[dict[str, object]] = []
        self.summary: dict[str, int] = {}

    def define_metric(self, *_: object, **__: object) -> None: ...

    def finish(self) -> None: ...

    def log(self, values: dict[str, object]) -> None:
        self.logged.append(values)

    def use_artifact(self, artifact: Any) -> None:
        self.used = artifact

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        self.model, self.aliases = artifact, aliases


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    """The run that wandb begins, with an account."""
    run = FakeRun()
    monkeypatch.setattr("wandb.init", lambda **_: run)
    monkeypatch.setattr("wandb.login", lambda **_: True)
    return run


def fake_tracker(
    run_dir: Path,
    mode: WandbMode = WandbMode.offline,
    *,
    path: object = ("pets.jsonl",),
    upload: bool = False,
) -> WandbTracker:
    config = run_config(mode).tracking
    config.upload = upload
    sets = {"more": {"path": "cats.jsonl"}, "hub": {"path": "owner/name"}}
    data = {"source": Source.local, "path": path and [*path], "sets": sets}
    return WandbTracker(config, run_dir, {"data": data}, name="n", group="g", job_type="ppo")


@pytest.mark.parametrize(
    ("run_dir", "group"),
    [("runs/pets/monday", "pets"), ("runs/sweeps/kl-1a2b/seed=1", "kl-1a2b")],
    ids=["alone", "job of a sweep"],
)
def test_names_are_those_of_the_config_and_the_sweep(
    run_dir: str, group: str, compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("wandb.init", lambda **how: given.update(how) or FakeRun())
    words = ["name=pets", "tracking.project=zoo", "tracking.entity=team", "tracking.tags=[a,b]"]
    config = to_run_config(compose(["tracking=wandb_offline", *words]))
    folder = tmp_path / run_dir
    folder.mkdir(parents=True)
    build_tracker(config, folder, is_main=True, say=[].append).finish()
    expected = {"project": "zoo", "entity": "team", "tags": ["a", "b"], "mode": "offline"}
    expected |= {"group": group, "job_type": "sft+reward+ppo", "name": folder.name}
    assert {key: given[key] for key in expected} == expected


@pytest.mark.parametrize("is_resumed", [False, True])
def test_samples_come_beside_the_response_before_training(
    is_resumed: bool, run: FakeRun, tmp_path: Path
) -> None:
    tracker: Tracker = fake_tracker(tmp_path)
    files = FileTracker(tmp_path, [].append)
    tokens = [Token("t", 0.1, 0.2, 0.3, 0.4)] * 3
    for step, response in ((0, "old"), (5, "later"), (10, "new")):
        if is_resumed and step == 10:
            again = {"W&B": IsolatedTracker(partial(fake_tracker, tmp_path), 20)}
            Trackers([], NO_ALARMS, [].append, again).repeat_logs(tmp_path, 10)
            tracker = again["W&B"].tracker
        parts = {"gold": 0.5, "exact": 1.0}
        for each in (tracker, files):
            sample = Sample("p", response, True, 1.5, 0.25, tokens, parts)
            each.samples("ppo", step, [sample], steps=10)
    files.finish()
    table = run.logged[-1]["ppo/samples"]
    assert isinstance(table, import_module("wandb").Table)
    names = "step,model,prompt,response,response before,score,gold,exact,KL,tokens,ended"
    assert table.columns == names.split(",")
    assert table.data[-1] == [10, "actor", "p", "new", "old", 1.5, 0.5, 1.0, 0.25, 3, True]


def test_the_id_of_a_sweep_agent_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []
    monkeypatch.setattr("wandb.init", lambda *, id, **_: given.append(id) or FakeRun())
    (tmp_path / "wandb_id").write_text("mine\n")
    fake_tracker(tmp_path)
    monkeypatch.setenv("WANDB_RUN_ID", "theirs")
    fake_tracker(tmp_path)
    assert given == ["mine", "theirs"]
    assert (tmp_path / "wandb_id").read_text() == "theirs\n"


def test_the_agent_of_a_sweep_gives_overrides(compose: Compose) -> None:
    """The agent of wandb puts its values into the command of examples/wandb_sweep.yaml."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    sweep = yaml.safe_load((ROOT / "examples" / "wandb_sweep.yaml").read_text())
    values = {"ppo.kl_ctl": {"value": 0.25}, "ppo.cliprange": {"value": 0.125}}
    assert sweep["parameters"].keys() == values.keys()
    words = create_sweep_command_args({"args": values})["args_no_hyphens"]
    assert sweep["command"][-1] == "${args_no_hyphens}"
    config = to_run_config(compose([*sweep["command"][3:-1], *words]))
    found = (config.tracking.wandb, config.ppo.kl_ctl, config.ppo.cliprange)
    assert found == (WandbMode.online, 0.25, 0.125)


def test_long_phases_stay_below_a_hundred_increments(run: FakeRun, tmp_path: Path) -> None:
    tracker = fake_tracker(tmp_path)
    for step in range(0, 5001, 5):
        tracker.samples("ppo", step, [Sample("p", "r", True, 1.5, 0.25, [])], steps=5000)
    assert len(run.logged) == MOST_INCREMENTS + 1
    assert run.logged[-1]["ppo/step"] == 5000


def test_a_connection_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wandb.errors import CommError

    attempts: list[str] = []

    def init(*, id: str, **_: object) -> FakeRun:
        attempts.append(id)
        if attempts.count(id) < 3:
            raise CommError("timed out")
        return FakeRun()

    monkeypatch.setattr("wandb.init", init)
    monkeypatch.setattr("wandb.teardown", lambda: attempts.append("teardown"))
    fake_tracker(tmp_path)
    assert attempts == [attempts[0], "teardown", attempts[0], "teardown", attempts[0]]


def test_steps_that_the_server_has_are_not_sent_again(run: FakeRun, tmp_path: Path) -> None:
    run.summary["ppo/step"] = 3
    tracker = fake_tracker(tmp_path, WandbMode.online)
    for step in (2, 3, 4):
        tracker.log("ppo", step, {"ppo/clipfrac": 0.1})
        tracker.log("ppo", step, {"ppo/eval_score": 0.1})
        tracker.append("rollouts.jsonl", "ppo", step, [{"score": 0.5}, {"score": 1.0, "text": "a"}])
        tracker.append("digests.jsonl", "ppo", step, [{"weights": {}}])
    histogram = run.logged[-1]["ppo/histograms/rollouts/score"]
    assert isinstance(histogram, import_module("wandb").Histogram)
    assert sum(histogram.histogram) == 2
    tracker.log("sft", 1, {"sft/loss": 0.1})
    steps = [(name, line[name]) for line in run.logged for name in line if name.endswith("/step")]
    assert steps == [*[("ppo/step", 4)] * 3, ("sft/step", 1)]


def test_steps_of_an_offline_attempt_with_a_later_name_are_not_sent_again(
    run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of an attempt has the local time, which may have been set back since."""
    rows = [{"ppo/step": step, "ppo/clipfrac": 0.1} for step in (4, 5, 1, 2, 3)]
    monkeypatch.setattr("rlhf.run.wandb_run.read_wandb_history", lambda _: rows)
    tracker = fake_tracker(tmp_path)
    for step in (4, 5, 6):
        tracker.log("ppo", step, {"ppo/clipfrac": 0.1})
    assert [row["ppo/step"] for row in run.logged] == [6]


def test_steps_that_the_server_lacks_are_sent_from_the_logs(run: FakeRun, tmp_path: Path) -> None:
    files = FileTracker(tmp_path, [].append)
    for step in (1, 2, 3, 4):
        files.log("ppo", step, {"ppo/clipfrac": math.nan})
        files.append("rollouts.jsonl", "ppo", step, [{"score": 0.5}] * 2)
        files.samples("ppo", step, [Sample("p", "r", True, 1.5, 0.25, [])], steps=10)
    files.finish()
    run.summary["ppo/step"] = 2
    again = IsolatedTracker(partial(fake_tracker, tmp_path, WandbMode.online), 20)
    Trackers([], NO_ALARMS, [].append, {"W&B": again}).repeat_logs(tmp_path, 10)
    sent = [(name, line["ppo/step"]) for line in run.logged for name in line if "step" not in name]
    names = ("ppo/samples", "ppo/histograms/rollouts/score", "ppo/clipfrac")
    assert sent == [(name, step) for name in names for step in (3, 4)]


@pytest.mark.parametrize("linked", ["", "run-a.wandb"])
def test_files_beyond_a_link_are_not_cut(linked: str, tmp_path: Path) -> None:
    """Neither of a folder that is a link, nor of a file."""
    other, attempt = tmp_path / "other", tmp_path / "run/wandb/offline-run-1-a"
    other.mkdir()
    (other / "run-a.wandb").write_bytes(b"abc")
    (attempt / linked).parent.mkdir(parents=True)
    (attempt / linked).symlink_to(other / linked)
    cut_incomplete_records(tmp_path / "run")
    assert (other / "run-a.wandb").read_bytes() == b"abc"
    assert (attempt / linked).is_symlink()


def test_files_of_killed_attempts_end_with_a_whole_record_or_go(tmp_path: Path) -> None:
    """Cut between records, within a record, within a header, and before the first record ends."""
    from wandb.proto.wandb_internal_pb2 import Record

    text = Record(num=1).SerializeToString()
    whole = struct.pack("<IHB", 0, len(text), FULL) + text
    contents = [whole + whole, whole + whole[:-1], whole + whole[: HEADER - 1], whole[:-1], b""]
    paths = [tmp_path / f"wandb/offline-run-{n}-a/run-a.wandb" for n in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(FILE_HEADER) + content)
    cut_incomplete_records(tmp_path)
    left = [path.read_bytes()[FILE_HEADER:] if path.exists() else None for path in paths]
    assert left == [whole + whole, whole, whole, None, None]


def test_a_pipe_among_the_files_of_attempts_is_left_alone(tmp_path: Path) -> None:
    """Reading it would wait for ever."""
    pipe = tmp_path / "wandb/offline-run-1-a/run-a.wandb"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    cut_incomplete_records(tmp_path)
    assert read_wandb_history(tmp_path) == []
    assert pipe.is_fifo()


@pytest.mark.parametrize("fault", ["", "error: no\n  network", "hangs"])
def test_views_are_saved_beside_the_run_and_a_failure_is_one_line(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        assert command[-2:] == ["team/zoo", "--once"]
        if fault == "hangs":
            raise subprocess.TimeoutExpired("save", how["timeout"])
        done = subprocess.CompletedProcess(
            command, 2 if fault else 0, "https://a\nhttps://b", fault
        )
        assert how["check"]
        done.check_returncode()
        return done

    said: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(subprocess, "run", answer)
    wandb_run.save_views("team/zoo", said.put)
    line = said.get(timeout=20)
    by_hand = "python -m rlhf.report.dashboards team/zoo"
    reasons = {"hangs": "Command 'save' timed out after 300 seconds"}
    reason = reasons.get(fault, " ".join(fault.split()))
    failed = f"warning: no views of team/zoo were saved ({reason}). Later: {by_hand}"
    assert line == (failed if fault else "views of team/zoo: https://a")
    monkeypatch.setattr(wandb_run, "find_spec", lambda _: None)
    wandb_run.save_views("team/zoo", said.put)
    assert said.get(timeout=20).endswith(f": pip install 'rlhf[dashboards]' && {by_hand}")


def test_an_online_run_uses_its_data(
    run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pets.jsonl", "cats.jsonl"):
        Path(name).write_text("{}\n")
    fake_tracker(tmp_path, WandbMode.online)
    assert (run.used.name, run.used.type) == ("data-local", "dataset")
    found = {entry.path: entry.ref for entry in run.used.manifest.entries.values()}
    names = ("pets.jsonl", "cats.jsonl")
    assert found == {f"{n}-{name}": (tmp_path / name).as_uri() for n, name in enumerate(names)}
    fake_tracker(tmp_path, WandbMode.online, path=None)  # blended data alone
    assert list(run.used.manifest.entries) == ["0-cats.jsonl"]


@pytest.mark.parametrize("upload", [False, True])
def test_models_are_referred_to_or_uploaded(upload: bool, run: FakeRun, tmp_path: Path) -> None:
    weights = tmp_path / "sft" / "model" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    tracker = fake_tracker(tmp_path, upload=upload)
    tracker.conclude({"objective": 0.5, "phases": {"sft": {}}})
    assert (run.model.name, run.aliases) == ("a1-sft-model", [tmp_path.name])
    (entry,) = run.model.manifest.entries.values()
    assert (entry.ref, entry.local_path is not None) == (
        (None, True) if upload else (weights.as_uri(), False)
    )


def test_the_padding_of_a_block_is_no_record(tmp_path: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    records = [Record(num=number) for number in (1, 2)]
    pad = 3  # bytes that hold no header of a record
    records[0].uuid = "a" * (BLOCK - FILE_HEADER - HEADER - pad - records[0].ByteSize() - 5)
    first, second = (record.SerializeToString() for record in records)
    assert FILE_HEADER + HEADER + len(first) == BLOCK - pad
    parts = [struct.pack("<IHB", 0, len(each), FULL) + each for each in (first, second)]
    path = tmp_path / "run.wandb"
    path.write_bytes(bytes(FILE_HEADER) + parts[0] + bytes(pad) + parts[1])
    assert [record.num for record, _ in read_wandb_records(path)] == [1, 2]
