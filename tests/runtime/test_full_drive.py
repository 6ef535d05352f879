"""A drive that is full, read-only or over its quota ends a run with one message, and loses nothing.

``make soak`` refuses every file (tests/soak_drives.py); here some of each kind are refused.
"""

import marshal
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import WarmPopen
from tests.runs import ROOT, TINY_RUN, launch, python, words_that_are_read
from tests.soak_drives import COMMAND


def mounted(folder: Path, kib: int) -> bool:
    """Mount a small file system; return False if this user may not."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_small_drive_is_the_reason(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    if not mounted(drive, 40):
        pytest.skip("mounting a file system needs root")
    words = [*TINY_RUN, "phase=sft", "checkpoint.every_minutes=null", "resume=auto"]
    try:
        for kib in (40, 240):
            subprocess.run(["mount", "-o", f"remount,size={kib}k", drive], check=True)
            run = launch(*words, f"run_dir={drive / 'run'}", cwd=tmp_path)
            assert run.returncode == 2, run.stderr
            message = (
                rf"error: {drive}/run/\S+( cannot be written|: the checkpoint) .*No space left"
            )
            assert re.search(message, run.stderr), run.stderr
            assert "Traceback" not in run.stderr
        subprocess.run(["mount", "-o", "remount,size=64m", drive], check=True)
        run = launch(*words, f"run_dir={drive / 'run'}", cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        subprocess.run(["mount", "-o", "remount,ro", drive], check=True)
        report = python("-m", "rlhf.report", drive / "run")
        assert report.returncode == 2
        assert "report.html cannot be written (Read-only file system)" in report.stderr
        assert "Traceback" not in report.stderr
    finally:
        subprocess.run(["umount", drive], check=True)


@pytest.mark.slow
def test_a_limit_on_file_sizes_leaves_no_cut_bytecode(tmp_path: Path) -> None:
    """Python would store what fits, and end with EOFError at every start from then on."""
    bytecode = {"PYTHONPYCACHEPREFIX": str(tmp_path / "code"), "PYTHONDONTWRITEBYTECODE": ""}
    environment = os.environ | bytecode
    subprocess.run([sys.executable, "-c", "pass"], env=environment, check=True)  # its own modules
    child = "import rlhf, subprocess as s, sys; s.run([sys.executable, '-c', 'import fractions'])"
    for words in ([str(ROOT / "launch.py"), "--version"], ["-m", "rlhf.runs", "."], ["-c", child]):
        command = f"ulimit -f 8; exec {shlex.join([sys.executable, *words])}"
        subprocess.run(["bash", "-c", command], env=environment, cwd=tmp_path, check=True)
    for path in tmp_path.rglob("*.pyc"):
        marshal.loads(path.read_bytes()[16:])


@pytest.mark.slow
def test_a_run_outlasts_its_output(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "launch.py"), *TINY_RUN, *COMMAND[-2:]]
    words = words_that_are_read([*words, "phase=sft", f"run_dir={tmp_path / 'run'}"])
    read, write = os.pipe()
    os.close(read)  # as `| head` leaves it
    with open("/dev/full", "w") as full, os.fdopen(write, "w") as broken:
        run = WarmPopen(words, cwd=tmp_path, stdout=broken, stderr=full)
    assert run.wait() == 0
    assert (tmp_path / "run" / "result.json").exists()
    assert (tmp_path / "run" / "report.html").exists()
