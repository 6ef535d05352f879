"""examples/plugin: SAPO as a wheel, in an environment of its own, from its installation on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.runs import ROOT, TINY_RUN, wait_for

SAPO = ["ppo=sapo", "ppo.steps=3", "ppo.rollout_batch_size=8", "ppo.mini_batch_size=4"]
SAPO += ["ppo.epochs=null"]


class Environment:
    """An environment that sees the packages of this one, and has its own."""

    def __init__(self, folder: Path) -> None:
        venv.EnvBuilder().create(folder / "venv")
        self.folder, self.python = folder, folder / "venv/bin/python"
        (packages,) = (folder / "venv").glob("lib/*/site-packages")
        base = sysconfig.get_path("purelib")
        (packages / "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")

    def run(self, *words: object, code: int = 0) -> str:
        """Run ``python words``, which must end with ``code``; return what it printed."""
        command = [str(self.python), *map(str, words)]
        ended = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=False, timeout=300
        )
        assert ended.returncode == code, f"{words}\n{ended.stdout}\n{ended.stderr}"
        assert "Traceback" not in ended.stderr
        return ended.stdout + ended.stderr

    def launch(self, *words: object, code: int = 0) -> str:
        """Run launch.py as ``run`` does."""
        return self.run(ROOT / "launch.py", *words, code=code)

    def pip(self, *words: object) -> None:
        """Run pip on this environment, without a network."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), *map(str, words)]
        ended = subprocess.run(pip, cwd=self.folder, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """An environment with SAPO's wheel."""
    made = Environment(tmp_path)
    shutil.copytree(ROOT / "examples/plugin", tmp_path / "plugin")
    made.pip("install", "-q", "--no-deps", "--no-build-isolation", tmp_path / "plugin")
    shutil.rmtree(tmp_path / "plugin")
    return made


@pytest.mark.slow
def test_a_method_is_a_wheel(environment: Environment, tmp_path: Path) -> None:
    """It is explained, refused, planned, trained, and missed by a run that used it."""
    assert "SAPO: temperature of the gate" in environment.launch("--help", "ppo.sapo_temperature")
    refused = environment.launch("experiment=smoke", *SAPO, "ppo.cliprange=0.3", code=2)
    assert "ppo.cliprange=0.3: has no effect with ppo.sapo_temperature=1.0" in refused
    run = tmp_path / "run"
    environment.launch(*TINY_RUN, *SAPO, f"run_dir={run}")
    stored = yaml.safe_load((run / "config.yaml").read_text())
    assert stored["methods"] == {"sapo": "rlhf-sapo 0.1.0"}
    assert stored["ppo"]["sapo_temperature"] == 1.0
    assert "gdpo" not in stored["ppo"], "keys of methods that are off are not stored"
    environment.pip("uninstall", "-q", "-y", "rlhf-sapo")
    missing = "the run uses the method sapo of rlhf-sapo 0.1.0, which is not installed"
    assert missing in environment.launch(f"resume={run}", code=2)
    for command in ("rlhf.evaluate", "rlhf.export"):
        assert missing in environment.run("-m", command, run, code=2)
    environment.run("-m", "rlhf.report", run)
    assert "finished" in environment.run("-m", "rlhf.runs", tmp_path)


@pytest.mark.soak
def test_a_method_is_killed_resumed_swept_and_examined(
    environment: Environment, tmp_path: Path
) -> None:
    assert "s per step" in environment.launch("experiment=smoke", *SAPO, "plan=only")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = [*TINY_RUN, *SAPO, "checkpoint.every_steps=1"]
    environment.launch(*words, f"run_dir={whole}")
    command = [str(environment.python), str(ROOT / "launch.py"), *words, f"run_dir={killed}"]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True) as process:
        wait_for(lambda: [*killed.glob("ppo/state/step-*")])
        os.killpg(process.pid, signal.SIGKILL)
    environment.launch(f"resume={killed}")
    results = [json.loads((each / "result.json").read_text()) for each in (whole, killed)]
    assert results[0]["phases"]["ppo"]["score_after"] == results[1]["phases"]["ppo"]["score_after"]
    weights = [(each / "ppo/actor/model.safetensors").read_bytes() for each in (whole, killed)]
    assert weights[0] == weights[1]
    sweep = ["ppo.sapo_temperature=0.5,2.0", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    environment.launch("-m", *TINY_RUN, *SAPO, *sweep)
    compared = environment.run("-m", "rlhf.report", tmp_path / "sweep")
    assert "ppo.sapo_temperature" in compared
    examined = environment.run("-m", "rlhf_lab.gradients", "experiment=smoke", *SAPO)
    assert "without limits" in examined
    far = [*SAPO, "ppo.sapo_temperature=20", "rollout.lag=2"]
    blamed = environment.run("-m", "rlhf_lab.gradients", "experiment=smoke", *far)
    assert "ppo.sapo_temperature=20.0" in blamed, "and not PPO's clip, which it replaces"
