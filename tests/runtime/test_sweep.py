"""A multirun: several whole runs from one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import TINY_RUN, launch, metrics

pytestmark = pytest.mark.slow


def test_every_job_of_a_sweep_is_a_run_of_its_own(tmp_path: Path) -> None:
    run = launch("-m", *TINY_RUN, "ppo.kl_ctl=0.02,0.5", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    (sweep,) = (tmp_path / "runs" / "sweeps").iterdir()
    jobs = [sweep / "0", sweep / "1"]
    assert [metrics(job)[-1]["ppo/kl_ctl"] for job in jobs] == [0.02, 0.5]
    sft_lines = [[m for m in metrics(job) if m["phase"] == "sft"] for job in jobs]
    assert sft_lines[0] == sft_lines[1], "the second job starts as fresh as the first"
    assert all("objective" in json.loads((job / "result.json").read_text()) for job in jobs)
