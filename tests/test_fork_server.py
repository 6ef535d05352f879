"""Processes forked from a zygote are what new interpreters would be."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import ON_GPU, ROOT, is_warm, read_at_start
from tests.pretend_cuda.gpu import missing_to_pretend
from tests.runs import python, start

pytestmark = pytest.mark.slow
IS_WARM = "import sys; warm = 'deepspeed' in sys.modules\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def parent_of(pid: int) -> int:
    (parent,) = re.findall(r"^PPid:\s(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(parent)


def wait_for_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


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


def test_a_module_is_found_in_the_working_directory(script: Path, tmp_path: Path) -> None:
    script.write_text(f"{IS_WARM}print(warm, __name__, sys.argv[1:], sys.path[0])\n")
    run = python("-u", "-m", "script", "word", cwd=tmp_path)
    assert run.stdout == f"True __main__ ['word'] {tmp_path}\n", run.stderr


@pytest.mark.parametrize(
    ("statement", "code", "complaint"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
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
    warm, new = python(script), python(script, popen=subprocess.Popen)
    assert warm.returncode == new.returncode == code
    assert warm.stderr.endswith(complaint)
    assert new.stderr.endswith(complaint)


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


@pytest.mark.skipif(missing_to_pretend() is not None, reason=str(missing_to_pretend()))
def test_a_zygote_has_loaded_the_pretended_gpu(script: Path) -> None:
    script.write_text(
        f"{IS_WARM}import torch\nfrom deepspeed.accelerator import get_accelerator\n"
        "print(warm, get_accelerator().device_name(), torch.cuda.is_available())\n"
    )
    assert python("-m", "tests.pretend_cuda", script, **ON_GPU).stdout == "True cuda True\n"
    assert python(script, **ON_GPU).stdout == "True cuda False\n", "there is none until it starts"
    assert python(script).stdout == "True cpu False\n"


def test_a_process_is_killed_when_its_time_is_over(script: Path, tmp_path: Path) -> None:
    script.write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        python(script, cwd=tmp_path, timeout=2)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_it_is_a_child_of_its_own_process_group(script: Path) -> None:
    script.write_text("print('ready', flush=True)\ninput()\n")
    with start(script, cwd=script.parent, stdin=subprocess.PIPE) as process:
        wait_for_line(process, "ready")
        assert parent_of(process.pid) == os.getpid()
        assert os.getpgid(process.pid) == process.pid
        assert process.poll() is None
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


def test_it_leaves_no_process_behind(script: Path) -> None:
    script.write_text(
        "import subprocess, sys\n"
        "if sys.argv[1:]: subprocess.run([sys.executable, sys.argv[0]], check=True)\n"
    )

    def descendants(pid: int) -> set[int]:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {int(child) for child in children}.union(*map(descendants, map(int, children)))

    python(script)
    before = len(descendants(os.getpid()))
    for _ in range(3):
        python(script, "two")
    assert len(descendants(os.getpid())) == before


@pytest.mark.parametrize(
    ("words", "added", "expected"),
    [
        (["-m", "module"], {}, True),
        (["-u", "script.py", "word"], {"RANK": "1", "OMP_NUM_THREADS": "1"}, True),
        (["script.py"], {"GOMP_SPINCOUNT": "10000"}, True),  # as in a zygote
        (["script.py"], {"GOMP_SPINCOUNT": "5"}, False),
        (["script.py"], {"HF_HUB_OFFLINE": "0"}, False),
        (["script.py"], ON_GPU, False),  # of a zygote without the pretended GPU
        (["-X", "importtime", "script.py"], {}, False),
        (["-c", "pass"], {}, False),
        ([], {}, False),
    ],
)
def test_what_an_interpreter_reads_at_its_start_is_not_forked(
    words: list[str], added: dict[str, str], expected: bool
) -> None:
    imported_with = {read_at_start(os.environ)}
    env = os.environ | added
    assert is_warm([sys.executable, *words], env, imported_with) is expected
    assert not is_warm(["/bin/sh", *words], env, imported_with)


def test_a_library_may_start_a_process_while_it_is_imported() -> None:
    # As the CUDA build of torch does in the zygote, where Popen is already replaced.
    code = "import subprocess; from tests.fork_server import WarmPopen\n"
    code += "subprocess.Popen = WarmPopen; print(subprocess.check_output(['echo', 'started']))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stdout == "b'started\\n'\n", run.stderr


def test_settings_of_the_allocator_are_applied(script: Path) -> None:
    script.write_text(
        "import pathlib, re, torch\n"
        "def resident(): return int(re.search(r'RssAnon:\\s+(\\d+)',\n"
        "    pathlib.Path('/proc/self/status').read_text())[1])\n"
        "before = resident(); block = torch.ones(2**22); del block  # 2**14 KiB\n"
        "print(resident() - before)\n"
    )
    kept = {"MALLOC_MMAP_MAX_": 0, "MALLOC_TRIM_THRESHOLD_": 10**12}
    assert int(python(script, **kept).stdout) > 2**13 > int(python(script).stdout)


def test_a_directory_that_is_not_there_is_an_error(script: Path, tmp_path: Path) -> None:
    script.write_text("")
    with pytest.raises(FileNotFoundError):
        python(script, cwd=tmp_path / "missing")
