"""What is chosen for GPUs: whole micro-batches, and the simplest setting that is as fast as any."""

from dataclasses import replace

import pytest

from rlhf.config.batches import batch_plans
from rlhf.config.choices import Phase
from rlhf.plan.plan import Plan, plan_run
from rlhf.plan.steps import assume_loads
from tests.plan.planned import Compose, plan_of, run_of

pytestmark = pytest.mark.slow

CHECKPOINTING = "model.gradient_checkpointing=true"

# Sequences of many lengths, as data has: single rows need no padding, which tempts.
LENGTHS = (40, 60, 80, 100, 120, 140, 160, 200)


def planned(compose: Compose, *words: str) -> Plan:
    config = run_of(compose, *words)
    loads = {
        phase: replace(load, lengths=LENGTHS, steps=200, held_out=64, answer=20)
        for phase, load in assume_loads(config).items()
    }
    return plan_run(config, loads)


def has_room(plan: Plan) -> bool:
    """Whether a plan fits and fills at most 93 % of a GPU, as choices do where they can."""
    return plan.fits and plan.peak_bytes <= plan.machine.memory * 0.93


@pytest.mark.parametrize(
    ("hardware", "model"),
    [
        ("v100_32g", ["model=opt_125m"]),
        ("rtx_4090_24g", ["model=qwen3_0.6b"]),
        ("a100_80g", ["model=opt_6.7b", "model@reward_model=opt_350m", "lora=all"]),
        ("8xl40s_48g", ["model=llama3.1_8b", "lora=all", "phase=pipeline_dpo"]),
    ],
)
def test_the_simplest_setting_and_whole_micro_batches(
    hardware: str, model: list[str], compose: Compose
) -> None:
    words = [f"hardware={hardware}", *model]
    plan = planned(compose, *words)
    assert plan.fits
    if plan.machine.ranks == 1:
        simple = planned(compose, *words, "zero=stage1")
        is_as_fast = has_room(simple) and simple.seconds <= plan.seconds * 1.05
        assert plan.zero_text == "ZeRO stage 1" or not is_as_fast
    stage = f"zero=stage{plan.config.zero.stage}"
    for phase in plan.phases:
        pair = 1 if phase.phase in (Phase.sft, Phase.ppo) else 2
        larger = f"{phase.phase}.micro_batch_size={16 // pair}"
        has_16 = batch_plans(plan.config)[phase.phase].per_rank >= 16 // pair
        is_plain = plan.zero_text == f"ZeRO stage {plan.config.zero.stage}"
        if phase.micro_batch == 1 and has_16 and is_plain:
            assert not has_room(planned(compose, *words, stage, larger)), larger


@pytest.mark.parametrize(
    ("words", "stage", "micro"),
    [
        # The first two filled 97 and 96 % before, in the same seconds. The third has no choice
        # below 93 %; in the fourth such a choice costs 60 % more time.
        (("hardware=a100_80g", "model=qwen3_1.7b"), 1, 16),
        (("hardware=8xa100_80g", "model=llama3.1_8b", CHECKPOINTING), 2, 4),
        (("hardware=8xa100_80g", "model=llama2_7b", "zero=stage2"), None, None),
        (("experiment=tables/table1_opt_30b_8xa100_40g",), None, None),
    ],
    ids=["one", "eight", "no room", "costly room"],
)
def test_choices_leave_room(
    words: tuple[str, ...], stage: int | None, micro: int | None, compose: Compose
) -> None:
    plan = plan_of(compose, *words)
    assert plan.fits
    assert has_room(plan) == (stage is not None)
    if stage is not None:
        assert (plan.config.zero.stage, plan.phases[-1].micro_batch) == (stage, micro)


# benchmarks/gpu.md: seconds to generate, score and train in one PPO step on an H200.
MEASURED = {
    ("model=opt_350m", "model.vocab_size=400"): (64, (0.47, 0.06, 0.43)),
    ("model=llama3.2_1b",): (128, (0.72, 0.39, 2.45)),
}


@pytest.mark.parametrize("model", MEASURED, ids=lambda model: model[0])
def test_steps_take_about_the_time_that_an_h200_took(
    model: tuple[str, ...], compose: Compose
) -> None:
    responses, measured = MEASURED[model]
    batches = (f"ppo.rollout_batch_size={responses}", f"ppo.mini_batch_size={responses}")
    lengths = ("rollout.max_prompt_tokens=17", "rollout.max_response_tokens=256")
    words = ("phase=pipeline_rule", "model@reward_model=gold", "ppo.micro_batch_size=64")
    random = ("model.init=random", "model.path=null", *lengths, *batches)
    plan = plan_of(compose, "hardware=h200_141g", *model, *words, *random)
    seconds = plan.phases[-1].step_seconds
    for part, each in zip(("generate", "score", "train"), measured, strict=True):
        assert seconds[part] == pytest.approx(each, rel=0.15), part


def test_small_passes_take_the_time_of_their_launches(compose: Compose) -> None:
    """On the same H200 each step of the default run's model took 18 to 21 milliseconds."""
    plan = plan_of(compose, "hardware=h200_141g")
    sft, reward, ppo = (phase.step_seconds["train"] for phase in plan.phases)
    steps = 8  # 128 responses in mini-batches of 64, twice, for actor and critic
    for found in (sft, reward, ppo / steps):
        assert found == pytest.approx(0.0185, rel=0.25)


def test_of_equally_fast_micro_batches_the_smallest_is_taken(compose: Compose) -> None:
    words = ("model=opt_350m", "hardware=a100_80g", "zero=stage1", "phase=sft")
    chosen = plan_of(compose, *words).phases[0]
    largest, smaller = (
        plan_of(compose, *words, f"sft.micro_batch_size={micro}").phases[0]
        for micro in (32, chosen.micro_batch // 2)
    )
    assert chosen.micro_batch < 32
    assert chosen.seconds <= 1.05 * largest.seconds
    assert smaller.seconds > 1.05 * largest.seconds


def test_a_short_phase_does_not_hide_its_steps(compose: Compose) -> None:
    """Building the model takes longer than seven steps, and small passes cost only launches."""
    words = (
        "experiment=smoke",
        "hardware=a100_40g",
        "zero=stage1",
        "phase=sft",
        "sft.batch_size=16",
    )
    config = run_of(compose, *words)
    load = replace(assume_loads(config)[Phase.sft], lengths=(20, 25, 30), steps=7, held_out=8)
    (plan,) = plan_run(config, {Phase.sft: load}).phases
    assert sum(plan.other_seconds.values()) > 10 * plan.steps * plan.step_seconds["train"]
    assert plan.micro_batch == 16


def test_gradients_of_many_micro_batches_are_rounded(compose: Compose) -> None:
    words = ("model=opt_125m", "hardware=a100_80g", "phase=sft", "sft.batch_size=1024")
    (warning,) = plan_of(compose, *words, "zero=stage1", "sft.micro_batch_size=1").warnings
    assert warning.startswith(
        "sft adds the gradients of 1024 micro-batches in bf16, which rounds their sum by about 3.2%"
    )
    assert "zero=stage0" in warning
    assert plan_of(compose, *words, "zero=stage0", "sft.micro_batch_size=1").warnings == ()
    assert plan_of(compose, *words, "zero=stage1", "sft.micro_batch_size=8").warnings == ()


def test_a_model_larger_than_a_gpu_is_sampled_faster_by_a_server(compose: Compose) -> None:
    words = ("model=llama2_70b", "model@reward_model=llama3.2_1b", "hardware=64xa100_80g")
    given = (*words, "phase=ppo", CHECKPOINTING, "zero=stage3", "launcher.watchdog_minutes=null")
    plan = plan_of(compose, *given)
    (warning,) = plan.warnings
    seconds = plan.phases[-1].step_seconds
    assert f"generation takes {seconds['generate']:.0f} of the {sum(seconds.values()):.0f} s" in (
        warning
    )
    assert "rollout=vllm_server with rollout.server.gpus=N plans it" in warning
    for other in ("rollout.gather_weights=never", "rollout=hybrid_engine", "model=llama2_7b"):
        assert plan_of(compose, *given, other).warnings == ()
