"""Two commands that use one run directory at once: exactly one runs, the other is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from rlhf.base.errors import ConfigError
from rlhf.config.freeze import load_frozen_config, to_run_config, write_frozen_config
from rlhf.config.run_dir import make_run_dir
from rlhf.jobs import job as job_module
from rlhf.jobs.job import begin_run
from rlhf.jobs.launch_command import Job
from rlhf.runtime.worker import run_worker

Compose = Callable[[list[str]], DictConfig]


def test_a_run_that_begins_between_check_and_writing_is_kept(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    words = ["experiment=smoke", "plan=off", "hardware.dtype=fp32", f"run_dir={run_dir}"]
    other = to_run_config(compose([*words, "seed=2"]))

    def make_for_both(*given: object, **how: object) -> Path:
        made = make_run_dir(*given, **how)  # type: ignore[arg-type]
        write_frozen_config(other, made)  # the other command is faster
        return made

    monkeypatch.setattr(job_module, "make_run_dir", make_for_both)
    cfg = compose([*words, "seed=1"])
    with pytest.raises(ConfigError, match="already holds a run"):
        begin_run(to_run_config(cfg), Job(cfg, [*words, "seed=1"]), None)
    assert load_frozen_config(run_dir) == other
    assert not (run_dir / "command.txt").exists()


def test_a_worker_does_not_take_another_runs_configuration_for_its_own(
    compose: Compose, tmp_path: Path
) -> None:
    words = ["experiment=smoke", "hardware.dtype=fp32"]
    begun = to_run_config(compose([*words, "seed=1"]))
    write_frozen_config(to_run_config(compose([*words, "seed=2"])), tmp_path)
    with pytest.raises(ConfigError, match="another command began or resumed a run in this folder"):
        run_worker(tmp_path, begun=begun)
