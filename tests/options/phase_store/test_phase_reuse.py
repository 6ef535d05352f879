"""What happens to finished phases before and after a run: verified, cleaned up, stored, reused."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlhf.base.errors import CheckpointError
from rlhf.config.choices import Dtype, Phase
from rlhf.config.freeze import to_run_config
from rlhf.options.phase_store import phases
from rlhf.options.phase_store.phase_store import PhaseStore
from rlhf.options.phase_store.phases import compute_store_key, store_phase
from rlhf.phases.shared.context import RunContext
from rlhf.run.finished_phase import finish_phase
from rlhf.runtime.phase_runs import verify_finished_phases
from tests.conftest import Compose
from tests.runs import TINY_RUN, launch, new_cache

SFT = [word for word in TINY_RUN if not word.startswith(("ppo", "reward", "rollout"))]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was killed between the result of sft and the removal of its checkpoint."""
    run_dir = tmp_path / "run"
    (run_dir / "sft" / "model").mkdir(parents=True)
    (run_dir / "sft" / "model" / "weights").write_text("w")
    (run_dir / "sft" / "state" / "step-00000006").mkdir(parents=True)
    finish_phase(run_dir, Phase.sft, {"perplexity_after": 2.0})
    (run_dir / "sft" / ".actor.building").mkdir()
    return run_dir


def test_a_finished_phase_keeps_no_checkpoint_of_a_killed_attempt(
    compose: Compose, run: Path
) -> None:
    said: list[str] = []
    for keeps in (True, False):
        config = to_run_config(compose([f"checkpoint.keep_finished={str(keeps).lower()}"]))
        verify_finished_phases(run, [Phase.sft], config, said.append)
        assert (run / "sft" / "state").exists() is keeps
        assert not (run / "sft" / ".actor.building").exists()
    assert said == []


def test_a_state_that_is_a_link_is_not_followed(compose: Compose, run: Path) -> None:
    (run / "sft").rename(run / "elsewhere")
    (run / "sft").symlink_to(run / "elsewhere")
    with pytest.raises(CheckpointError, match="sft is a link"):
        verify_finished_phases(run, [Phase.sft], to_run_config(compose([])), print)
    assert (run / "elsewhere" / "state").exists()


def test_a_store_that_fails_costs_a_line_and_not_the_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device", "weights")

    monkeypatch.setattr(PhaseStore, "put", refuse)
    said: list[str] = []
    context = cast(Any, SimpleNamespace(run_dir=run, console=SimpleNamespace(say=said.append)))
    store_phase(context, PhaseStore(tmp_path / "store", max_gib=1), "k", Phase.sft)
    assert said == [f"sft: not stored in {tmp_path}/store (No space left on device: weights)"]


@pytest.mark.slow
def test_a_run_of_reused_phases_ends_resumes_and_notices_damage(tmp_path: Path) -> None:
    cache = new_cache(tmp_path / "cache")

    def sft(run_dir: str) -> str:
        words = (*SFT, "phase=sft", "reuse.phases=always", f"run_dir={run_dir}")
        run = launch(*words, cwd=tmp_path, RLHF_CACHE=cache)
        assert run.returncode == 0, run.stderr
        return " ".join(run.stdout.split())

    sft("one")
    assert "sft: taken from" in sft("two")
    assert (tmp_path / "two" / "result.json").is_file()
    weights = tmp_path / "two" / "sft" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    os.chmod(weights, 0o644)
    weights.write_bytes(content)  # a hard link: the store's file and run one's too
    assert "is not used:" in sft("three")
    run = launch("resume=two", cwd=tmp_path, RLHF_CACHE=cache)
    assert run.returncode == 2
    assert "model.safetensors is damaged: it is not what was written" in run.stderr


def test_the_key_of_a_phase_knows_the_precision_that_auto_chose(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "phase_data_hash", lambda *_: "data")
    found = []
    for dtype, chosen in (("auto", "fp32"), ("auto", "bf16"), ("fp32", "fp32")):
        words = ["reuse.phases=always", f"hardware.dtype={dtype}"]
        context = cast("RunContext", SimpleNamespace(config=to_run_config(compose(words))))
        monkeypatch.setattr(phases, "resolve_dtype", lambda *_, c=chosen: Dtype(c))
        found.append(compute_store_key(context, Phase.sft))
    assert found[0] == found[2] != found[1]
