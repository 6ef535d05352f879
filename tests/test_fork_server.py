"""Processes forked from a zygote are what new interpreters would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import ON_GPU, SAMPLES, is_warm, read_at_start
from tests.runs import python, start

pytestmark = pytest.mark.slow
IS_WARM = "import sys; warm = 'deepspeed' in sys.modules\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def test_a_script_gets_what_a_new_interpreter_would_give_it(script: Path, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script.write_text(
        f"{IS_WARM}import os, beside\n"
        "print(warm, __name__, sys.argv, os.getcwd(), os.environ['ADDED'], sys.stdin.read())\n"
        "print(beside.NAME, file=sys.stderr)\n"
    )
    run = python(script, "a b", cwd=tmp_path, ADDED=1)
    assert (run.returncode, run.stderr) == (0, "beside\n")
    assert run.stdout == f"True __main__ {[str(script), 'a b']} {tmp_path} 1 \n"
    run = python("-u", "-m", "script", "word", cwd=tmp_path, ADDED=1)
    assert run.stdout == f"True __main__ {[str(script), 'word']} {tmp_path} 1 \n", run.stderr


@pytest.mark.parametrize(
    ("statement", "code", "complaint"),
    [
        ("sys.exit('sorry')", 1, "sorry\n"),
        ("raise ValueError('broken')", 1, "ValueError: broken\n"),
        ("os._exit(4)", 4, ""),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt\n"),
        ("import atexit; atexit.register(lambda: print('end', file=sys.stderr))", 0, "end\n"),
    ],
)
def test_it_ends_as_an_interpreter_does(
    statement: str, code: int, complaint: str, script: Path
) -> None:
    script.write_text(f"import os, sys\n{statement}\n")
    warm = python(script)
    assert warm.returncode == code
    assert warm.stderr.endswith(complaint)


def test_nothing_of_one_process_reaches_the_next(script: Path) -> None:
    script.write_text(
        "import os, random, sys, deepspeed, numpy, torch\n"
        "print(hasattr(deepspeed, 'left'), 'LEFT' in os.environ, torch.rand(1).item())\n"
        "print(random.random(), numpy.random.rand(), file=sys.stderr)\n"
        "deepspeed.left = os.environ['LEFT'] = 'behind'\n"
        "torch.manual_seed(0)\n"
    )
    first, second = python(script), python(script)
    assert first.stdout.startswith("False False ")
    assert first.stdout == second.stdout
    drawn = [*first.stderr.split(), *second.stderr.split()]
    assert len(set(drawn)) == 4, "states that an interpreter draws at its start are drawn anew"


def test_it_is_a_child_of_its_own_process_group(script: Path) -> None:
    script.write_text("import os\nprint('ready', os.getppid(), flush=True)\ninput()\n")
    with start(script, cwd=script.parent, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"ready {os.getpid()}\n"
        assert os.getpgid(process.pid) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == -signal.SIGTERM


def test_a_process_forks_others_from_a_clean_zygote_of_its_own(
    script: Path, tmp_path: Path
) -> None:
    (tmp_path / "child.py").write_text(
        f"{IS_WARM}import os, deepspeed\n"
        "print(warm, hasattr(deepspeed, 'changed'), os.getppid(), os.getsid(0) == os.getpid())\n"
    )
    script.write_text(
        "import os, subprocess, sys, deepspeed\ndeepspeed.changed = True\n"
        "print(os.getpid(), flush=True)\n"
        "subprocess.run([sys.executable, 'child.py'], check=True, start_new_session=True)\n"
    )
    run = python(script, cwd=tmp_path)
    pid, *words = run.stdout.split()
    assert words == ["True", "False", pid, "True"], run.stderr


@pytest.mark.parametrize(
    ("words", "added", "expected"),
    [
        (["-u", "script.py", "word"], {"RANK": "1", "OMP_NUM_THREADS": "1"}, True),
        (["script.py"], {"GOMP_SPINCOUNT": "10000"}, True),  # as in a zygote
        (["script.py"], {"GOMP_SPINCOUNT": "5"}, False),
        (["script.py"], ON_GPU, False),  # of a zygote without the pretended GPU
        (["-X", "importtime", "script.py"], {}, False),
        (["-c", "pass"], {}, False),
        ([*SAMPLES, "31", "7"], {"PYTHONHASHSEED": "0"}, True),
        (["-P", "-m", "rlhf.base.supervisor", "rlhf.rewards.isolated:serve_scores"], {}, False),
    ],
)
def test_what_an_interpreter_reads_at_its_start_is_not_forked(
    words: list[str], added: dict[str, str], expected: bool
) -> None:
    imported_with = {read_at_start(os.environ)}
    env = os.environ | added
    assert is_warm([sys.executable, *words], env, imported_with) is expected
    assert not is_warm(["/bin/sh", *words], env, imported_with)
