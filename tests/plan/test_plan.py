"""The planner's choice: fits wherever anything fits, and no admissible setting is faster."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.base.errors import ConfigError
from rlhf.config.choices import SPLIT_PHASES, Device, Dtype, Phase, When
from rlhf.config.freeze import to_run_config
from rlhf.config.hydra_parts import composing
from rlhf.config.machine_rates import GIB, machine_of
from rlhf.config.schema.hardware import HardwareConfig
from rlhf.config.schema.run import RunConfig
from rlhf.config.validation import validate
from rlhf.options import Backend
from rlhf.options.lora.keys import LoraRole
from rlhf.plan.advice import zero_candidates
from rlhf.plan.plan import Plan, plan_run, resolve_auto, select_best_plan
from tests.conftest import CONF
from tests.plan.planned import TINY_MODEL, Compose, changed, run_of

pytestmark = pytest.mark.slow

SIZES = (256, 1024, 2048, 4096, 5120)


@cache
def composed(*overrides: str) -> RunConfig:
    with composing(CONF):
        return to_run_config(hydra_compose("config", list(overrides)))


@cache
def profiles() -> list[HardwareConfig]:
    """All of conf/hardware; the CPU with 16 GiB, whatever this machine has."""
    found = []
    for path in sorted((CONF / "hardware").glob("*.yaml")):
        sizes = ["sft.batch_size=64", "reward.batch_size=64"]
        profile = composed(f"hardware={path.stem}", *sizes).hardware
        if profile.device is Device.cpu:
            profile = replace(profile, memory_gib=16, host_memory_gib=16, dtype=Dtype.bf16)
        found.append(profile)
    return found


def opt(hidden: int, layers: int) -> dict[str, Any]:
    return TINY_MODEL | {
        "vocab_size": 50272,
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden,
        "num_attention_heads": hidden // 64,
        "num_hidden_layers": layers,
        "max_position_embeddings": 2048,
    }


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    """A run with zero=auto: machine, models, batches, lengths, adapters, average, recomputation."""
    hardware = draw(st.sampled_from(profiles()))
    if hardware.device is Device.cpu:
        hardware = replace(hardware, ranks_per_node=draw(st.sampled_from((1, 2))))
    ranks = hardware.nodes * hardware.ranks_per_node
    per_rank, tokens = st.sampled_from((1, 2, 6, 8, 24)), st.sampled_from((16, 128, 512))
    mini = ranks * draw(per_rank)
    lora = {"rank": draw(st.sampled_from((0, 0, 16)))}
    lora["train_rest"] = bool(lora["rank"]) and draw(st.booleans())
    lora["roles"] = draw(st.sampled_from(([LoraRole.actor, LoraRole.critic], list(LoraRole))))
    fields = opt(draw(st.sampled_from(SIZES)), draw(st.sampled_from((2, 12, 32))))
    again = {"gradient_checkpointing": draw(st.sampled_from((False, True, 4)))}
    order = draw(st.sampled_from(([*SPLIT_PHASES], [Phase.sft, Phase.dpo], [Phase.sft])))
    return changed(
        replace(composed("model=opt_125m"), hardware=hardware),
        phase={"order": order},
        model={"architecture": fields} | again,
        reward_model=again,
        lora=lora,
        sft={"batch_size": ranks * draw(per_rank), "max_tokens": draw(tokens)},
        reward={"batch_size": ranks * draw(per_rank), "max_tokens": draw(tokens)},
        dpo={"batch_size": ranks * draw(per_rank), "max_tokens": draw(tokens)},
        ppo={
            "mini_batch_size": mini,
            "rollout_batch_size": mini * draw(st.sampled_from((1, 3))),
            "ema_beta": draw(st.sampled_from((0.0, 0.99))),
        },
        rollout={
            "max_prompt_tokens": draw(tokens),
            "max_response_tokens": draw(tokens),
            "backend": draw(st.sampled_from((Backend.fast, Backend.hf))),
        },
    )


@st.composite
def manual(draw: st.DrawFn, run: RunConfig) -> RunConfig:
    """The same run as somebody sets it up by hand, with micro-batches within the machine's cap."""
    stages, flag = st.integers(0, 3), st.booleans()
    zero: dict[str, Any] = {"auto": False, "stage": draw(stages)}
    zero["critic_stage"] = draw(st.none() | stages)
    for key in ("optimizer", "parameters", "reference", "reward", "ema"):
        zero[f"offload_{key}"] = draw(st.sampled_from((False, False, True)))
    ranks = run.hardware.nodes * run.hardware.ranks_per_node
    cap = run.hardware.max_micro_batch_size
    micro = {}
    for phase in run.phase.order:
        group_by_setting = getattr(run, phase.value)
        batch = run.ppo.mini_batch_size if phase is Phase.ppo else group_by_setting.batch_size
        largest = max(1, cap // 2) if phase in (Phase.reward, Phase.dpo) else cap
        share = batch // ranks
        sizes = [n for n in range(1, min(largest, share) + 1) if share % n == 0]
        micro[phase.value] = {"micro_batch_size": draw(st.none() | st.sampled_from(sizes))}
    rollout = {"max_rows": draw(st.none() | st.integers(1, 20))}
    if draw(flag):
        rollout["gather_weights"] = draw(st.sampled_from(list(When)))
    return changed(run, zero=zero, rollout=rollout, **micro)


def admissible(run: RunConfig) -> Plan | None:
    """The plan of what the checks admit and the memory model too."""
    if run.hardware.dtype is Dtype.fp16 and 0 in (run.zero.stage, run.zero.critic_stage):
        return None  # refused where the engine is built, for there the precision is known
    try:
        validate(run)
    except ConfigError:
        return None
    plan = plan_run(run)
    return plan if plan.fits else None


def test_on_a_cpu_a_run_starts_later_with_more_data(compose: Compose) -> None:
    def start(*overrides: str) -> float:
        plan = plan_run(run_of(compose, *overrides))
        return plan.seconds - sum(phase.seconds for phase in plan.phases)

    assert start("experiment=smoke") == pytest.approx(4 + 2_000 * 6e-5)
    assert start("experiment=smoke", "data.size=102000") == pytest.approx(4 + 102_000 * 6e-5)
    assert start("model=opt_125m", "hardware=a100_80g") == pytest.approx(0)


def check_auto(data: st.DataObject) -> None:
    """A run with zero=auto fits if a setting by hand does, and none of these is faster."""
    run = data.draw(runs())
    auto = plan_run(run)
    if auto.fits:
        # What is written into the configuration is admitted, fits, and takes as long.
        again = admissible(resolve_auto(auto))
        assert again is not None
        assert again.seconds == pytest.approx(auto.seconds)
    for _ in range(6):
        by_hand = admissible(data.draw(manual(run)))
        if by_hand is not None:
            assert auto.fits
            # On a GPU 5 % decide neither between micro-batches nor between settings of ZeRO.
            slack = 1.05**2 if auto.machine.is_gpu else 1.0
            assert auto.seconds <= by_hand.seconds * slack * (1 + 1e-9)


@settings(max_examples=7, deadline=None)
@given(st.data())
def test_auto_fits_where_anything_fits_and_nothing_admissible_is_faster(
    data: st.DataObject,
) -> None:
    check_auto(data)


@pytest.mark.soak
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_auto_is_best_in_many_runs(data: st.DataObject) -> None:
    check_auto(data)


def test_where_nothing_fits_the_smallest_is_told(compose: Compose) -> None:
    config = run_of(compose, "model=opt_66b", "hardware=a6000_48g", "phase=sft")
    plan = plan_run(changed(config, hardware={"memory_gib": 8}))
    assert not plan.fits
    assert (plan.config.zero.stage, plan.config.zero.offload_parameters) == (3, True)
    assert max(phase.peak_bytes for phase in plan.phases) > plan.limit == 8 * GIB * 0.98 * 0.97
    by_hand = replace(plan.config.zero, offload_parameters=False)
    larger = plan_run(replace(plan.config, zero=by_hand))
    assert max(p.peak_bytes for p in larger.phases) > max(p.peak_bytes for p in plan.phases)


def test_a_rule_that_no_zero_setting_keeps_is_named(compose: Compose) -> None:
    hybrid = ["hardware=cpu", "rollout=hybrid_engine"]
    with pytest.raises(ConfigError, match=r"hybrid_engine with hardware\.device=cpu: DeepSpeed's"):
        run_of(compose, "phase=pipeline_dpo", *hybrid)
    assert plan_run(run_of(compose, "phase=sft", *hybrid)).fits, "SFT samples no responses"
    refused = changed(run_of(compose), rollout={"stop": [""]})  # a rule that validate keeps
    with pytest.raises(ConfigError, match=r"rollout\.stop=\[''\]: an empty text"):
        plan_run(refused)


def test_the_hosts_memory_is_a_limit_too(compose: Compose) -> None:
    config = run_of(
        compose, "model=opt_6.7b", "hardware=a100_40g", "zero=stage3_offload", "phase=sft"
    )
    fitting = changed(config, hardware={"host_memory_gib": 200})
    assert plan_run(fitting).fits
    short = plan_run(changed(config, hardware={"host_memory_gib": 100}))
    # 6.7e9 weights of 2 bytes, gradients of 4, a master and two moments of 4 each: 111.6 GiB.
    assert short.misfit_reason == (
        "a node's memory must hold 114 GiB (112 offloaded, 0 while a model is loaded, 2 for "
        "processes), and 90 can be used (90% of hardware.host_memory_gib=100)"
    )
    words = ("model=opt_6.7b", "hardware=a100_80g", "zero=stage1", "phase=sft", "lora=all")
    small = changed(run_of(compose, *words), hardware={"host_memory_gib": 29})
    # One GPU's engine makes its weights from 6.7e9 numbers of 4 bytes in the host's memory.
    reason = plan_run(small).misfit_reason or ""
    assert "(0 offloaded, 25 while a model is loaded, 2 for processes)" in reason
    words = ("hardware=a100_80g", "zero=stage0", "phase=reward", "reward_model.init=random")
    scorer = run_of(compose, *words, "model=opt_125m", "model@reward_model=opt_1.3b")
    assert plan_run(scorer).loaded_bytes == pytest.approx(1.3e9 * 4, rel=0.02)
    drive = changed(config, hardware={"host_memory_gib": 100}, zero={"nvme_path": "/nvme"})
    assert plan_run(drive).fits


def test_a_step_that_outlasts_the_watchdog_is_named(compose: Compose) -> None:
    words = ["model=opt_6.7b", "hardware=a100_80g", "zero=stage2_offload"]
    words += ["ppo.rollout_batch_size=1024", "rollout.max_response_tokens=1024"]
    (warning,) = plan_run(run_of(compose, *words, "launcher.watchdog_minutes=30")).warnings
    assert warning.startswith("launcher.watchdog_minutes=30: a step of ppo takes about ")
    assert plan_run(run_of(compose, *words, "launcher.watchdog_minutes=null")).warnings == ()


def test_the_fastest_that_fits_and_the_earlier_of_two(compose: Compose) -> None:
    plan = plan_run(run_of(compose, "model=opt_125m", "hardware=a100_80g", "phase=sft"))

    def with_(*, seconds: float, parts: int) -> Plan:
        (phase,) = plan.phases
        faked = replace(
            phase,
            step_seconds={"train": seconds},
            steps=1,
            moments={"training": type(phase.peak_parts)(weights=parts)},
            host=0,
        )
        return replace(plan, phases=(faked,), limit=100)

    slow, quick, large = (
        with_(seconds=2, parts=10),
        with_(seconds=1, parts=90),
        with_(seconds=0.5, parts=101),
    )
    assert select_best_plan([slow, large, quick]) is quick
    twin = with_(seconds=1, parts=20)
    assert select_best_plan([twin, quick]) is twin
    assert select_best_plan([quick, twin]) is quick
    assert select_best_plan([with_(seconds=1, parts=300), large]) is large


@pytest.mark.parametrize(
    ("hardware", "has_stage_0", "offloads"),
    [("v100_32g", False, True), ("a100_80g", True, True), ("cpu", True, False)],
)
def test_candidates_of_auto(
    hardware: str, has_stage_0: bool, offloads: bool, compose: Compose
) -> None:
    """Weights in fp16 need masters, and a CPU has nowhere to offload to."""
    config = run_of(compose, "model=opt_125m", f"hardware={hardware}", "ppo.ema_beta=0.99")
    found = [each.zero for each in zero_candidates(config, machine_of(config.hardware))]
    stages = {(zero.stage, zero.critic_stage) for zero in found}
    assert ((0, None) in stages) is has_stage_0
    assert has_stage_0 or all(0 not in pair for pair in stages)
    assert {(1, None), (2, None), (3, None), (2, 3)} <= stages
    keys = {key for zero in found for key, value in vars(zero).items() if value is True}
    assert {key for key in keys if key.startswith("offload")} == (
        {f"offload_{name}" for name in ("optimizer", "parameters", "reference", "reward", "ema")}
        if offloads
        else set()
    )


def test_time_price_and_disk(compose: Compose) -> None:
    config = run_of(compose, "model=opt_1.3b", "hardware=8xa100_80g", "zero=stage1")
    config = changed(config, data={"size": 80000}, ppo={"ema_beta": 0.99})
    plan = plan_run(config)
    by_hand = sum(p.steps * sum(p.step_seconds.values()) for p in plan.phases if p.steps)
    assert all(0 < p.other_seconds["evaluate"] < 1000 for p in plan.phases), "of unread data too"
    by_hand += sum(sum(p.other_seconds.values()) for p in plan.phases)
    assert plan.hours == pytest.approx(by_hand / 3600)
    assert plan.price == pytest.approx(by_hand / 3600 * 14.32)
    # Kept are SFT model, actor with its average, reward model and critic, in 2 bytes a number.
    policy, scorer = 1315758080, 1315760128
    assert plan.saved_model_bytes == 2 * (3 * policy + 2 * scorer)
    # fp32 weights, two moments, the actor's average: one checkpoint, and the next being written.
    assert plan.checkpoint_bytes == 2 * 4 * (4 * policy + 3 * scorer)
    never = plan_run(changed(config, checkpoint={"every_minutes": None}))
    assert never.checkpoint_bytes == 0
    unknown = plan_run(changed(config, data={"size": 0, "path": None}))
    assert unknown.hours is None
    assert unknown.price is None
    assert unknown.seconds > 0
    assert plan_run(changed(config, hardware={"price_per_hour": None})).price is None
