"""Files of the current directory replace no module, whatever the program starts there.

The directory may hold downloaded data. ``python launch.py`` itself does not look there, but
``python -m`` and ``python -c`` do, with which libraries start processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardTerm
from rlhf.rewards.isolated import IsolatedReward
from rlhf.rewards.rules import Answers
from tests.rewards.endpoint import endpoint
from tests.runs import ROOT, TINY_RUN, launch

# Modules that Python, the project or its libraries import early, in many processes.
NAMES = "abc argparse base64 ctypes dataclasses enum inspect io json logging multiprocessing numpy"
NAMES += " pickle random re signal socket string torch typing urllib3 yaml rlhf hydra deepspeed"
SPY = "open({!r}, 'a').write(__name__ + chr(10)); raise SystemExit('of the current directory')"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with modules that report when they run; return the report."""
    report = tmp_path / "report"
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in NAMES.split():
        (folder / f"{name}.py").write_text(SPY.format(str(report)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(folder)
    return report


def test_the_modules_report_when_they_run(hostile: Path) -> None:
    subprocess.run([sys.executable, "-m", "rlhf.report"], capture_output=True, check=False)
    assert hostile.read_text()


def test_no_kind_of_part_runs_them(hostile: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text("{}")
    Path("mine.py").write_text(
        "import json, socket, statistics\n"
        "def f(prompts, responses):\n"
        "    import enum, pickle, random\n"
        "    return [1.0]\n"
    )
    with endpoint() as server:
        parts = {
            RewardKind.http: {"url": server.url},
            RewardKind.function: {"function": "mine:f"},
            RewardKind.stop: {},
            RewardKind.json: {"json_schema": str(schema)},
        }
        for kind, keys in parts.items():
            part = IsolatedReward("mine", RewardTerm(kind=kind, **keys))
            part.send_answers(Answers(["?"], ["1"], [True], [1], {}))
            assert part.receive_scores().scores == [1], kind
            part.close()
    assert not hostile.exists(), hostile.read_text()


def test_what_a_function_starts_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.chdir(tmp_path)
    Path("helper.py").write_text("SCORE = 2")
    Path("script.py").write_text("import helper; print(helper.SCORE)")
    Path("mine.py").write_text(
        "import subprocess, sys\n"
        "def f(prompts, responses):\n"
        "    return [float(subprocess.check_output([sys.executable, 'script.py']))]\n"
    )
    part = IsolatedReward("mine", RewardTerm(kind=RewardKind.function, function="mine:f"))
    part.send_answers(Answers(["?"], ["1"], [True], [1], {}))
    assert part.receive_scores().scores == [2]
    part.close()


@pytest.mark.soak
def test_no_process_of_a_run_runs_them(hostile: Path) -> None:
    """The job of a sweep, its ranks, and the parts of each rank."""
    run = launch(
        *("-m", "seed=1"),
        *TINY_RUN,
        *("phase=pipeline_rule", "sft.epochs=0.1", "ppo.steps=1"),
        "hardware.ranks_per_node=2",
        "rewards.ends={kind: stop}",
        cwd=Path.cwd(),
        popen=subprocess.Popen,
        OMP_NUM_THREADS=1,
    )
    assert not hostile.exists(), hostile.read_text()
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("program", "words"),
    [
        pytest.param("rlhf.runtime.rank", ["hardware.ranks_per_node=2"], marks=pytest.mark.soak),
        ("deepspeed.launcher.runner", ["hardware.nodes=2", "launcher.hostfile=hosts"]),
    ],
)
def test_what_is_started_gets_the_setting(program: str, words: list[str], tmp_path: Path) -> None:
    """DeepSpeed's launcher and sbatch pass the environment on to other nodes."""
    fake = tmp_path.joinpath(*program.split(".")).with_suffix(".py")
    fake.parent.mkdir(parents=True)
    for folder in (fake.parent, fake.parent.parent):
        (folder / "__init__.py").touch()
    fake.write_text("import os; print('is', os.environ['PYTHONSAFEPATH']); raise SystemExit(1)")
    (tmp_path / "hosts").write_text("localhost slots=1\nother slots=1\n")
    settings = (f"{name}={os.environ[name]}" for name in ("RLHF_CACHE", "HF_HUB_OFFLINE"))
    (tmp_path / ".deepspeed_env").write_text("\n".join(settings))
    run = launch(
        *TINY_RUN,
        *words,
        "plan=off",
        cwd=tmp_path,
        popen=subprocess.Popen,
        PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]),
    )
    assert "is 1" in run.stdout, run.stderr
