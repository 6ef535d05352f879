"""Hostile words, files and texts are answered in one line."""

import errno
import os
import pickle
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from random import Random
from socket import create_connection

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import ConfigCompositionException
from optuna.storages.journal import JournalFileSymlinkLock
from rich.console import Console as RichConsole

from rlhf.base import isolated_process
from rlhf.base.atomic import write_text_atomically
from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.foreign_errors import to_drive_error
from rlhf.base.isolated_process import IsolatedProcess
from rlhf.base.stored_files import DamagedFileError
from rlhf.compare.preference_file import PreferenceFile
from rlhf.config.freeze import to_run_config
from rlhf.config.hydra_errors import (
    explain_hydra_error,
    refuse_unknown_flags,
    refuse_unreadable_words,
)
from rlhf.config.run_dir import LOCK, lock_run_dir
from rlhf.evaluate.__main__ import lock_evaluation
from rlhf.jobs import job
from rlhf.jobs.completion import CompletedConfig
from rlhf.jobs.launch_command import Job
from rlhf.jobs.search import JOURNAL, repair_journal
from rlhf.report.comparison import _reward_model_hash
from rlhf.report.page import LocalRequest, LocalServer
from rlhf.run.phase_state import remove_stale_checkpoints
from rlhf.watch.__main__ import build_draw_function
from rlhf.watch.progress import is_process_alive
from tests.conftest import Compose
from tests.fuzz import stores
from tests.fuzz.case import Case, Verdict, judged
from tests.fuzz.command_words import START, launched
from tests.watch.watched import started_run


@pytest.mark.parametrize("flag", ["--experimental-rerun", "--exp"])
def test_nothing_is_unpickled_by_a_flag(flag: str, tmp_path: Path) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps({}))
    with pytest.raises(ConfigError, match=r"would run code from a pickled file"):
        refuse_unknown_flags([flag, str(tmp_path / "a.pickle")])


@pytest.mark.parametrize("word", ["seed=" + "9" * 5000, "x" * 1500, "a=" + "[" * 900])
def test_words_that_no_parser_can_read_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=f"{len(word)} characters") as caught:
        refuse_unreadable_words(["seed=1", word])
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("word", "key"),
    [("resume=${oc.env:NOPE_NOT_SET}", "resume"), ("hydra.run.dir=a-${nope}", "hydra.run.dir")],
)
def test_an_interpolation_without_a_value_is_one_message(
    word: str, key: str, tmp_path: Path
) -> None:
    verdict, text = judged(Case(word, lambda: launched([*START, word], tmp_path)))
    assert verdict is Verdict.refused, text
    assert f"error: {key}: its interpolation has no value (" in text
    assert "must name another key" in text


def test_a_long_value_is_shortened_in_its_message(compose: Compose) -> None:
    with pytest.raises(ConfigError, match=r"^sft\.lr=x+\.\.\.: expected a number") as caught:
        to_run_config(compose(["sft.lr=" + "x" * 5000]))
    assert len(str(caught.value)) < 1000


def test_an_interpolation_that_cannot_be_read_is_placed(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/own.yaml").write_text('name: "${..}"')
    with (
        initialize_config_dir(str(tmp_path), version_base="1.3"),
        pytest.raises(ConfigCompositionException) as caught,
    ):
        hydra_compose(overrides=["+experiment=own"])
    said = str(explain_hydra_error(caught.value, []))
    assert said.startswith("a ${...} in a file that this command chose: ")


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_lock_of_another_kind_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir() if kind == "folder" else os.mkfifo(tmp_path / LOCK)
    with pytest.raises(DamagedFileError, match=r"it is (a folder|not)"), lock_run_dir(tmp_path):
        pass


def test_a_run_that_a_full_drive_ended_can_be_begun_again(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left", str(tmp_path))

    words = ["experiment=smoke", "plan=off", "hardware.dtype=fp32", f"run_dir={tmp_path / 'run'}"]
    cfg = compose(words)
    with monkeypatch.context() as full:
        full.setattr(job, "write_command", is_full)
        with pytest.raises(OSError, match="No space"):
            job.begin_run(CompletedConfig(to_run_config(cfg)), Job(cfg, words))
    job.begin_run(CompletedConfig(to_run_config(cfg)), Job(cfg, words))


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EFBIG, "raise the limit on file sizes (ulimit -f)"),
        (errno.ENOENT, "if they were moved"),
    ],
)
def test_the_advice_fits_the_error_of_the_drive(number: int, advice: str) -> None:
    assert advice in str(to_drive_error(OSError(number, "reason", "/drive/file")))


def test_a_file_of_choices_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--out FILE"):
        PreferenceFile(Path("/proc/p.jsonl"))
    PreferenceFile(tmp_path / "p.jsonl").close()
    assert not list(tmp_path.iterdir()), "nothing was chosen"


def test_the_name_of_a_run_cannot_control_the_terminal(tmp_path: Path) -> None:
    run_dir = started_run(tmp_path / "run")
    config = run_dir / "config.yaml"
    name = r'name: "\e]0;PWN\a\e[31mred\x9b\x85"'
    config.write_text(config.read_text().replace("name: pets", name))
    file = StringIO()
    RichConsole(file=file, width=80, height=24).print(build_draw_function(run_dir)())
    assert "red" in file.getvalue()
    assert not set("\x1b\x9b\x85\x07") & set(file.getvalue())


@pytest.mark.parametrize("way", stores.WAYS)
def test_a_damaged_ensemble_is_refused(way: str, tmp_path: Path) -> None:
    for name in ("offsets", "1.head.weight"):
        stores.damage_ensemble(Random(3), tmp_path / name, way, name)
        with pytest.raises(CheckpointError):
            stores.score(tmp_path / name)


def test_a_torn_journal_loses_its_last_line_only(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    repair_journal(path)
    path.write_bytes(b'{"op_code": 0}\n{"op_c')
    repair_journal(path)
    assert path.read_bytes() == b'{"op_code": 0}\n'
    path.write_bytes(b'text\n{"op_code": 0}\n')
    with pytest.raises(DamagedFileError, match="line 1"):
        repair_journal(path)


def test_a_killed_search_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    journal = Path(JOURNAL)
    JournalFileSymlinkLock(str(journal)).acquire()
    with pytest.raises(FileExistsError):  # the name that Optuna gives to its lock
        Path(f"{JOURNAL}.lock").symlink_to(journal)
    repair_journal(journal)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_a_link_is_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "ppo/state").mkdir(parents=True)
    link = tmp_path / "ppo/state/.step-00000002.building"
    link.symlink_to(tmp_path / "precious")
    remove_stale_checkpoints(tmp_path / "ppo", last_step=1)
    assert (tmp_path / "precious").is_dir()
    assert not link.is_symlink()


def test_small_files_of_others_cause_no_traceback(tmp_path: Path) -> None:
    write_text_atomically(tmp_path / "page.html", "a\ud800b")
    assert (tmp_path / "page.html").read_text() == "a?b"
    (tmp_path / "run.lock").write_text(f"process {'1' * 5000} on host\n")
    assert is_process_alive(tmp_path) is None


def test_one_evaluation_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.config.run_dir.WAIT_SECONDS", 0.0)
    run_dir = started_run(tmp_path / "run")
    with (
        lock_evaluation(run_dir),
        pytest.raises(CheckpointError, match="two processes would mix"),
        lock_evaluation(run_dir),
    ):
        pass


def test_a_manifest_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "reward").mkdir()
    for content in ('{"a": 1}', '{"files": 5}', '{"files": null}', "[]", "9", ""):
        (tmp_path / "reward/manifest.json").write_text(content)
        with pytest.raises(DamagedFileError, match=r"reward/manifest\.json is damaged"):
            _reward_model_hash(tmp_path, {})


class Flood:
    """A socket that always has more bytes, and never the end of a line."""

    def __init__(self) -> None:
        self.reads = 0

    def settimeout(self, _: float) -> None:
        """Do nothing: no read waits."""

    def recv(self, size: int) -> bytes:
        self.reads += 1
        assert self.reads < 1000, "it reads for ever"
        return bytes(size)


@pytest.mark.parametrize(
    ("longest", "rest", "error"),
    [(1 << 20, 9.0, ConnectionResetError), (1 << 40, 0.0, TimeoutError)],
)
def test_a_process_that_floods_its_socket_is_given_up(
    longest: int, rest: float, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_process, "LONGEST_LINE_BYTES", longest)
    monkeypatch.setattr(isolated_process, "LEAST_READ_S", rest)
    process = object.__new__(IsolatedProcess)
    process.__dict__.update(_channel=Flood(), _received=bytearray())
    with pytest.raises(error):
        process.receive(until=0.0)


def test_half_open_connections_keep_nobody_waiting() -> None:
    with LocalServer(LocalRequest, 0) as server, ExitStack() as opened:
        port = server.server_address[1]
        for _ in range(100):  # nobody accepts them
            opened.enter_context(create_connection(("127.0.0.1", port), timeout=0.5))
