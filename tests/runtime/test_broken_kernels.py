"""A run whose kernels are broken says so, and computes what torch computes."""

import json
from pathlib import Path

import pytest

from rlhf.gpu_check.runs import differing_files
from tests.pretend_cuda.gpu import missing_to_pretend
from tests.runs import ON_GPU, ROOT, TINY_RUN, launch_on_gpu, python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_to_pretend() is not None, reason=str(missing_to_pretend())),
]
BROKEN = ("AdamW", "CUDA graphs", "attention over the KV cache", "log-probs")
REASONS = {"log-probs": "at 7:12: cannot compile"}
WORDS = [*TINY_RUN, "hardware=a100_40g", "hardware.dtype=bf16", "zero=stage1", "phase=ppo"]
WORDS += ["ppo.steps=1", "ppo.rollout_batch_size=8", "ppo.ppo_epochs=1", "ppo.eval_prompts=4"]
WORDS += ["rollout.max_response_tokens=4", "ppo.sample_every=9"]


def test_broken_kernels_change_no_number(tiny_run: Path, tmp_path: Path) -> None:
    words = [*WORDS, f"from_run={tiny_run}"]
    off = launch_on_gpu(*words, "hardware.kernels=off", "run_dir=off", cwd=tmp_path)
    assert off.returncode == 0, off.stderr
    assert "kernels: none, as hardware.kernels=off" in off.stdout
    assert "torch replaces" not in off.stderr + off.stdout

    launcher = ["-m", "tests.pretend_cuda", "-m", "tests.kernels.broken_kernels"]
    how = {"cwd": tmp_path, "PYTHONPATH": ROOT, "TRITON_INTERPRET": 1} | ON_GPU
    broken = python(*launcher, *words, "run_dir=broken", **how)
    assert broken.returncode == 0, broken.stderr
    result = json.loads((tmp_path / "broken" / "result.json").read_text())
    lines = result["phases"]["ppo"]["replaced_kernels"]
    assert len(lines) == len(BROKEN)
    page = (tmp_path / "broken" / "report.html").read_text()
    for name in BROKEN:
        (line,) = (line for line in lines if f"replaces {name} (" in line)
        assert REASONS.get(name, "its error is ") in line
        assert broken.stdout.count(f"\n{line}\n") == 2, "at its first use, and in the summary"
        assert f"replaces {name} (" in page
    # The result has the lines; all else is equal, bit for bit.
    assert differing_files(tmp_path / "off", tmp_path / "broken") == ["result.json"]
