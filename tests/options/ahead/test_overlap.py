"""What the planner counts of sampling beside training (rollout.overlap)."""

import pytest

from rlhf.config.choices import Phase
from rlhf.config.machine_rates import GIB
from rlhf.config.schema.run import RunConfig
from rlhf.options.ahead import overlap_plan
from rlhf.plan.phase_plan import PhasePlan
from rlhf.plan.plan import Plan, plan_run
from rlhf.plan.plan_tables import plan_as_json
from tests.plan.planned import Compose, changed, run_of

LAG = {"lag": 1}
BESIDE = LAG | {"overlap": True}


def ppo_of(plan: Plan) -> PhasePlan:
    (found,) = (phase for phase in plan.phases if phase.phase is Phase.ppo)
    return found


@pytest.fixture
def config(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run on a CPU with two cores."""
    monkeypatch.setattr(overlap_plan, "num_usable_cores", lambda: 2)
    words = ("experiment=smoke", "hardware.memory_gib=8", "hardware.dtype=bf16")
    return run_of(compose, *words, "hardware.peak_tflops=1", "hardware.memory_bandwidth_gb=40")


def test_a_step_takes_as_long_as_the_slower_half_of_the_cores(config: RunConfig) -> None:
    in_turn = ppo_of(plan_run(changed(config, rollout=LAG)))
    beside = ppo_of(plan_run(changed(config, rollout=BESIDE)))
    chosen = [(plan.micro_batch, plan.rows) for plan in (in_turn, beside)]
    assert chosen[0] == chosen[1], "the same run must come of both"
    sampling, score, train = (beside.step_seconds[n] for n in ("generate", "score", "train"))
    for part, seconds in beside.step_seconds.items():
        assert in_turn.step_seconds[part] < seconds <= 2 * in_turn.step_seconds[part], part
    assert beside.steps is not None
    slower, other = sorted([sampling, score + train], reverse=True)
    outside = sum(beside.other_seconds.values())
    assert beside.seconds - outside == pytest.approx(beside.steps * slower + other)


def test_processes_on_a_cpu_share_its_memory(config: RunConfig) -> None:
    in_turn = ppo_of(plan_run(changed(config, rollout=LAG)))
    one, two = (plan_run(changed(config, rollout=BESIDE | {"samplers": count})) for count in (1, 2))
    taken = ppo_of(one).peak_parts["samplers"]
    assert taken > 0.6 * GIB, "a process with torch"
    assert ppo_of(one).peak_bytes == in_turn.peak_bytes + taken
    assert taken < ppo_of(two).peak_parts["samplers"] < 2 * taken, "each keeps half of the KV cache"
    assert plan_as_json(one)["phases"]["ppo"]["memory"]["samplers"] == taken / GIB


def test_a_run_that_fits_only_without_overlap_is_told_so(config: RunConfig) -> None:
    needed = ppo_of(plan_run(changed(config, rollout=LAG))).peak_bytes / GIB
    tight = changed(config, rollout=BESIDE, hardware={"memory_gib": 1.2 * needed})
    plan = plan_run(tight)
    assert not plan.fits
    assert any("rollout.overlap=false" in way for way in plan.fitting_overrides)


def test_a_process_on_a_gpu_of_its_own_holds_only_the_policy(compose: Compose) -> None:
    words = ("model=opt_1.3b", "model@reward_model=opt_350m", "hardware=8xa100_80g", "zero=stage3")
    config = run_of(compose, *words, "ppo.rollout_batch_size=64", "ppo.mini_batch_size=64")
    in_turn = ppo_of(plan_run(changed(config, rollout=LAG)))
    beside = ppo_of(plan_run(changed(config, rollout=BESIDE)))
    process = beside.moments["generation beside training"]
    assert process["weights"] == 2 * 1315758080, "whole, in half precision"
    assert not {"gradients", "optimizer"} & set(+process)
    others = {name: beside.moments[name] for name in in_turn.moments}
    assert others == in_turn.moments
    assert beside.step_seconds["train"] == in_turn.step_seconds["train"]
    halves = plan_run(changed(config, rollout=BESIDE | {"samplers": 2}))
    assert ppo_of(halves).step_seconds["generate"] < beside.step_seconds["generate"]
