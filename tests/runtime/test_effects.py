"""Runs agree with what the schema declares of keys: each phase reads only keys that affect it, and
keys that affect no phase change no bit.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from rlhf.config.choices import Phase
from rlhf.config.effects import effects_by_key
from rlhf.config.freeze import load_frozen_config
from tests.runs import TINY_RUN, finished, metrics, python

pytestmark = pytest.mark.slow

# The plan would choose other micro-batches for another machine, which changes rounding.
PINNED = [f"{phase}.micro_batch_size=8" for phase in ("sft", "reward", "dpo", "ppo")]
CLAIMED_TO_CHANGE_NOTHING = """
name=other plan=off alarms.mute=[length] checkpoint.every_steps=1 checkpoint.keep=3
checkpoint.keep_finished=true checkpoint.most_skipped=7 data.cache_dir=elsewhere
hardware.name=other hardware.memory_gib=40 hardware.host_memory_gib=40 hardware.peak_tflops=9
hardware.fp32_tflops=9 hardware.memory_bandwidth_gb=99 hardware.price_per_hour=9
hardware.keep_freed_memory=true launcher.timeout_minutes=7 launcher.watchdog_minutes=7
launcher.master_port=12345 reuse.max_gib=9 rollout.server.timeout_seconds=9
tracking.tensorboard=true tracking.tags=[a] tracking.log_every=1 tracking.show_config=true
""".split()


@pytest.fixture(scope="module", params=["pipeline", "pipeline_dpo"])
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, with the file reads.json: the keys that each phase read."""
    folder = tmp_path_factory.mktemp("runs")
    words = [*TINY_RUN, *PINNED, f"phase={request.param}", f"run_dir={folder / 'run'}"]
    run = python("-m", "tests.config_reads", folder / "reads.json", *words)
    assert run.returncode == 0, run.stderr
    return folder / "run"


def test_a_phase_reads_only_keys_that_affect_it(run_dir: Path) -> None:
    reads = json.loads((run_dir.parent / "reads.json").read_text())
    config = load_frozen_config(run_dir)
    assert list(reads) == list(config.phase.order)
    assert {phase for phase in reads if f"{phase}.lr" in reads[phase] or phase == "ppo"} == {*reads}
    for phase, read in reads.items():
        for keys in read:
            # Keys that affect no phase are those of the next test.
            affected = [
                effects_by_key()[k].affects(config) for k in keys.split() if k in effects_by_key()
            ]
            assert not affected or any(not a or Phase(phase) in a for a in affected), (phase, keys)


def test_keys_that_affect_no_phase_change_no_bit(run_dir: Path, tmp_path: Path) -> None:
    config = load_frozen_config(run_dir)
    for word in CLAIMED_TO_CHANGE_NOTHING:
        assert not effects_by_key()[word.partition("=")[0]].affects(config), word
    phase = "phase=pipeline_dpo" if Phase.dpo in config.phase.order else "phase=pipeline"
    other = finished(tmp_path / "run", *PINNED, phase, *CLAIMED_TO_CHANGE_NOTHING)
    assert metrics(other) == metrics(run_dir)
    assert weights(other) == weights(run_dir) != {}


def weights(run_dir: Path) -> dict[str, str]:
    """Return the hashes of the final models."""
    return {
        str(path.relative_to(run_dir)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run_dir.rglob("*.safetensors"))
        if "state" not in path.parts
    }
