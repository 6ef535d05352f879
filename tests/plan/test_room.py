"""Plans that would not last: memory that is nearly full, a server, sampling beside training."""

from dataclasses import replace

import pytest

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Device
from rlhf.plan.plan import EFFICIENCY, efficiency_of, plan_run
from rlhf.plan.plan_tables import plan_summary, render_plan
from tests.plan.planned import Compose, changed, plan_of, run_of

pytestmark = pytest.mark.slow

LENGTH = "+rewards.short={kind:length,most:100}"


def test_no_plan_fills_a_gpu(compose: Compose) -> None:
    """32B with adapters on one H100 was planned at 99.7 %, 7B on eight A100 at 99 %."""
    for words in (
        ("hardware=8xb200_180g", "model=llama3.1_70b", "hardware.host_memory_gib=4000"),
        ("hardware=h100_80g", "model=qwen3_32b", "lora=all"),
        ("hardware=8xa100_80g", "model=llama2_7b", "zero=stage2"),
    ):
        plan = plan_of(compose, *words)
        assert plan.fits, words
        assert plan.peak_bytes <= 0.97 * 0.98 * plan.machine.memory, words


def test_a_plan_with_little_room_names_what_makes_room(compose: Compose) -> None:
    words = ("hardware=8xl40s_48g", "model=llama3.1_8b", "lora=all")
    plan = plan_of(compose, *words)
    assert plan.fits
    (warning,) = plan.warnings
    assert warning.startswith("memory is nearly full (")
    way = warning.partition("To free memory: ")[2].partition(" (")[0]
    roomier = plan_run(run_of(compose, *words, *way.split()))
    assert roomier.is_roomy
    assert roomier.warnings == ()


def test_the_critic_is_recomputed_where_it_alone_does_not_fit(compose: Compose) -> None:
    words = ("hardware=8xh100_80g", "model=llama3.1_8b", "rollout.max_response_tokens=32768")
    plan = plan_of(compose, *words, "model.gradient_checkpointing=true")
    assert "training of the critic" in (plan.misfit_reason or "")
    (way,) = plan.fitting_overrides
    assert way.startswith("reward_model.gradient_checkpointing=true (")
    both = " ".join(plan_of(compose, *words).fitting_overrides)
    assert "model.gradient_checkpointing=true reward_model.gradient_checkpointing=true" in both
    grpo = (
        *words,
        "phase=ppo",
        LENGTH,
        "ppo.advantage_estimator=grpo",
        "ppo.responses_per_prompt=4",
    )
    assert "reward_model." not in " ".join(plan_of(compose, *grpo).fitting_overrides)


def test_nodes_and_recomputation_are_combined_where_neither_is_enough(compose: Compose) -> None:
    plan = plan_of(compose, "hardware=l4_24g", "model=qwen3_32b", "lora=all")
    (way,) = plan.fitting_overrides
    both = "model.gradient_checkpointing=true reward_model.gradient_checkpointing=true"
    assert way.startswith(f"zero=auto {both} hardware.nodes=")


def test_a_server_samples_in_its_own_time(compose: Compose) -> None:
    words = ("hardware=8xh100_80g", "model=llama3.1_8b", "rollout=vllm_server", LENGTH, "phase=ppo")
    plan = plan_of(compose, *words)
    (phase,) = plan.phases
    assert "generate" not in phase.step_seconds
    assert phase.moments["generation"]["kv_cache"] == 0
    assert any("does not include generation" in str(each) for each in render_plan(plan))
    seconds = []
    for gpus in (1, 8):
        served = plan_of(compose, *words, f"rollout.server.gpus={gpus}")
        seconds.append(served.phases[0].step_seconds["generate"])
        assert served.phases[0].moments == phase.moments
        hours, price = plan.hours or 0.0, plan.price or 0.0
        assert (served.hours or 0.0) > hours
        per_hour = (served.price or 0.0) / (served.hours or 1.0)
        assert per_hour == pytest.approx(price / hours * (8 + gpus) / 8)
    with pytest.raises(
        ConfigError, match=r"rollout\.server\.gpus=1: the policy's weights take 131"
    ):
        plan_of(compose, *words, "model=llama3.1_70b", "rollout.server.gpus=1")
    assert seconds[0] / 8 < seconds[1] < seconds[0] / 2, "eight wait for each other"


def test_sampling_gpus_hold_the_rows_that_they_decode(compose: Compose) -> None:
    words = ["hardware=8xh100_80g", "hardware.ranks_per_node=4", "model=llama3.1_8b", LENGTH]
    words += ["phase=ppo", "rollout.overlap=true", "rollout.lag=1", "ppo.mini_batch_size=1024"]
    words += ["ppo.rollout_batch_size=1024", "rollout.max_response_tokens=256", "data=rm_static"]
    plan = plan_of(compose, *words)
    assert "generation beside training" in (plan.misfit_reason or "")
    ways = [way.partition(" (")[0] for way in plan.fitting_overrides]
    assert ways[:3] == ["rollout.samplers=2", "rollout.max_rows=512", "rollout.overlap=false"]
    half = plan_of(compose, *words, "rollout.max_rows=512").phases[0]
    cache = "kv_cache", "generation beside training"
    assert half.moments[cache[1]][cache[0]] * 2 == plan.phases[0].moments[cache[1]][cache[0]]


def test_a100s_reach_more_of_their_peak(compose: Compose) -> None:
    config = run_of(compose, "hardware=8xa100_80g", "model=llama3.1_8b")
    known = plan_run(config)
    usual = plan_run(changed(config, hardware={"training_share": None}))
    faster = usual.phases[0].step_seconds["train"] / known.phases[0].step_seconds["train"]
    assert 1.2 < faster <= 1.4
    assert efficiency_of(replace(known.machine, training_share=1.0)).scoring == 1.0
    assert efficiency_of(usual.machine) == EFFICIENCY[Device.cuda]
    assert "of 75.2 GiB" in plan_summary(known)
