"""A process goes on after its output has broken."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
from rlhf.base.command import survive_output_errors
survive_output_errors()
for number in range(2000):
    print(number, flush=number % 100 == 0)
os.system("echo from a child")
open(sys.argv[1], "w").write("the end was reached")
"""


def run(folder: Path, **streams: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", SCRIPT, folder / "end"]
    found = subprocess.run(words, text=True, check=False, **streams)  # type: ignore[call-overload]
    assert (folder / "end").read_text() == "the end was reached"
    assert found.returncode == 0
    return found


def test_a_closed_pipe_is_outlasted(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as broken:
        found = run(tmp_path, stdout=broken, stderr=subprocess.PIPE)
    assert found.stderr == ""


def test_a_full_drive_is_named_once_and_outlasted(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        found = run(tmp_path, stdout=full, stderr=subprocess.PIPE)
        assert found.stderr.count("the output cannot be written (No space left on device)") == 1
        run(tmp_path, stdout=full, stderr=full)
