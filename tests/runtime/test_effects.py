"""Runs agree with what the schema declares of keys: each phase reads only keys that affect it, and
keys that affect no phase change no bit.
"""

import json
from pathlib import Path

import pytest

from rlhf.config.choices import Phase
from rlhf.config.effects import effects_by_key
from rlhf.config.freeze import load_frozen_config
from tests.runs import finished, metrics

pytestmark = pytest.mark.slow

CLAIMED_TO_CHANGE_NOTHING = """
name=other plan=off alarms.mute=[length] checkpoint.every_steps=1 checkpoint.keep=3
checkpoint.keep_finished=true checkpoint.most_skipped=7 data.cache_dir=elsewhere
hardware.name=other hardware.memory_gib=40 hardware.host_memory_gib=40 hardware.peak_tflops=9
hardware.fp32_tflops=9 hardware.memory_bandwidth_gb=99 hardware.price_per_hour=9
hardware.training_share=0.3 hardware.keep_freed_memory=true launcher.timeout_minutes=7
launcher.watchdog_minutes=7 launcher.master_port=12345 reuse.max_gib=9
tracking.tensorboard=true tracking.log_every=1 tracking.show_config=true
""".split()


@pytest.mark.parametrize("name", ["option_run", "dpo_run", "episode_run"])
def test_a_phase_reads_only_keys_that_affect_it(name: str, request: pytest.FixtureRequest) -> None:
    run_dir: Path = request.getfixturevalue(name)
    reads = json.loads(run_dir.with_suffix(".json").read_text())
    config = load_frozen_config(run_dir)
    assert list(reads) == list(config.phase.order)
    assert {phase for phase in reads if f"{phase}.lr" in reads[phase] or phase == "ppo"} == {*reads}
    for phase, read in reads.items():
        for keys in read:
            if keys == "reward.combine":  # of which training only distinguishes warm
                continue
            # Keys that affect no phase are those of the next test.
            affected = [
                effects_by_key()[k].affects(config) for k in keys.split() if k in effects_by_key()
            ]
            assert not affected or any(not a or Phase(phase) in a for a in affected), (phase, keys)


def test_keys_that_affect_no_phase_change_no_bit(tiny_run: Path, tmp_path: Path) -> None:
    config = load_frozen_config(tiny_run)
    for word in CLAIMED_TO_CHANGE_NOTHING:
        assert not effects_by_key()[word.partition("=")[0]].affects(config), word
    # The sizes that the plan chose: without a plan there would be others, which changes rounding.
    sizes = [
        f"{phase}.micro_batch_size={getattr(config, phase).micro_batch_size}"
        for phase in config.phase.order
    ]
    other = finished(tmp_path / "run", *sizes, *CLAIMED_TO_CHANGE_NOTHING)
    assert metrics(other) == metrics(tiny_run)
    assert weights(other) == weights(tiny_run) != {}


def weights(run_dir: Path) -> dict[str, bytes]:
    """Return the final models."""
    return {
        str(path.relative_to(run_dir)): path.read_bytes()
        for path in run_dir.rglob("*.safetensors")
        if "state" not in path.parts
    }
