"""Whole runs on a pretended GPU, from the command line to the models that they save."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.runs import TINY_RUN, finished, launch_on_gpu, metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
FEW = ["sft.eval_examples=8", "reward.eval_examples=8", "ppo.eval_prompts=8", "dpo.eval_prompts=8"]


def on_gpu(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run a tiny pipeline on one A100."""
    words = [*TINY_RUN, *FEW, "hardware=a100_40g", *overrides, f"run_dir={run_dir}"]
    return launch_on_gpu(*words, cwd=run_dir.parent)


def results(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return found


def test_a_gpu_computes_what_a_cpu_does(tmp_path: Path) -> None:
    run = on_gpu(tmp_path / "gpu", "hardware.dtype=fp32", "zero=stage1")
    assert run.returncode == 0, run.stderr
    assert "1 x cuda, fp32" in run.stdout
    finished(tmp_path / "cpu", *FEW)
    there, here = (metrics(tmp_path / name) for name in ("gpu", "cpu"))
    assert len(there) == len(here)
    for gpu_line, cpu_line in zip(there, here, strict=True):
        assert gpu_line.keys() == cpu_line.keys()
        for name, value in cpu_line.items():
            if isinstance(value, float):
                assert gpu_line[name] == pytest.approx(value, rel=2e-3, abs=2e-4), name


def test_deepspeed_trains_on_a_gpu(tmp_path: Path) -> None:
    words = ["zero=stage3", "zero.engine=deepspeed", "lora=default", "ppo.ema_beta=0.9"]
    run = on_gpu(tmp_path / "run", *words, "hardware.dtype=bf16")
    assert run.returncode == 0, run.stderr
    assert results(tmp_path / "run")["phases"].keys() == {"sft", "reward", "ppo"}
