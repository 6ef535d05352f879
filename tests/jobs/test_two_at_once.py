"""Two commands that use one run directory at once: exactly one runs, the other is refused."""

import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from rlhf.base.errors import ConfigError
from rlhf.config.freeze import load_frozen_config, write_frozen_config
from rlhf.config.run_dir import make_run_dir
from rlhf.config.typed import to_run_config
from rlhf.jobs import job as job_module
from rlhf.jobs.completion import CompletedConfig
from rlhf.jobs.job import begin_run
from rlhf.jobs.launch_command import Job
from rlhf.runtime.worker import run_worker
from tests.conftest import Compose


def test_a_worker_does_not_take_another_runs_configuration_for_its_own(
    compose: Compose, tmp_path: Path
) -> None:
    words = ["experiment=smoke", "hardware.dtype=fp32"]
    begun = to_run_config(compose([*words, "seed=1"]))
    write_frozen_config(to_run_config(compose([*words, "seed=2"])), tmp_path)
    with pytest.raises(ConfigError, match="another command began or resumed a run in this folder"):
        run_worker(tmp_path, begun=begun)


def test_of_two_processes_that_begin_a_run_one_runs(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, both_are_here = tmp_path / "run", get_context("fork").Barrier(2)
    words = ["experiment=smoke", "plan=off", "hardware.dtype=fp32", f"run_dir={run_dir}"]
    configs = {seed: compose([*words, f"seed={seed}"]) for seed in (1, 2)}

    def make_together(*given: object, **how: object) -> Path:
        made = make_run_dir(*given, **how)  # type: ignore[arg-type]
        both_are_here.wait(30)
        return made

    def begin(seed: int) -> None:
        cfg = configs[seed]
        try:
            begin_run(CompletedConfig(to_run_config(cfg)), Job(cfg, [*words, f"seed={seed}"]))
        except ConfigError as error:
            sys.exit(2 if "already holds a run" in str(error) else 1)

    monkeypatch.setattr(job_module, "make_run_dir", make_together)
    started = {seed: get_context("fork").Process(target=begin, args=[seed]) for seed in (1, 2)}
    for process in started.values():
        process.start()
    for process in started.values():
        process.join(60)
    codes = {seed: process.exitcode for seed, process in started.items()}
    assert sorted(codes.values(), key=str) == [0, 2]
    winner = next(seed for seed, code in codes.items() if code == 0)
    assert load_frozen_config(run_dir).seed == winner
    assert f"seed={winner}" in (run_dir / "command.txt").read_text()
