"""What is said to fit really fits, once it is typed."""

from __future__ import annotations

import shlex
from functools import partial

import pytest

from rlhf.config.choices import ModelInit
from rlhf.config.freeze import to_run_config
from rlhf.config.validation import validate
from rlhf.plan import advice as planning_advice
from rlhf.plan.plan import Plan, plan_run
from tests.plan.planned import Compose, changed, run_of


def advice(plan: Plan) -> list[str]:
    """What would make the run of ``plan`` fit."""
    return planning_advice.advice(plan.asked, partial(plan_run, loads=plan.loads))


pytestmark = pytest.mark.slow

REFUSED = {
    "stage 2 of a large model": ["model=opt_13b", "hardware=8xa100_40g", "zero=stage2"],
    "one GPU": ["model=opt_13b", "hardware=a100_80g"],
    "too small a host": ["model=opt_66b", "hardware=8xa100_40g"],
    "large micro-batches": [
        *("model=opt_1.3b", "hardware=a100_40g", "zero=auto", "phase=sft"),
        *("sft.max_tokens=2048", "sft.micro_batch_size=32"),
    ],
    "adapters in the last phase only": [
        *("model=opt_6.7b", "model@reward_model=opt_350m", "hardware=template", "lora=default"),
    ],
    "adapters of another rank": [
        *("model=opt_6.7b", "model@reward_model=opt_350m", "hardware=template", "lora=default"),
        "lora.rank=8",
    ],
    "dpo": [
        *("model=opt_6.7b", "hardware=a6000_48g", "phase=pipeline_dpo", "zero=stage1"),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_way_fits_when_it_is_typed(name: str, compose: Compose) -> None:
    given = REFUSED[name]
    plan = plan_run(run_of(compose, *given))
    assert not plan.fits
    ways = advice(plan)
    assert ways
    for way in ways:
        words, _, told = way.partition(" (")
        replaced = {word.partition("=")[0] for word in shlex.split(words)}
        kept = [word for word in given if word.partition("=")[0] not in replaced]
        config = to_run_config(compose([*kept, *shlex.split(words)]))
        validate(config)
        again = plan_run(config)
        assert again.fits, way
        assert told.startswith(again.zero_text), way


def test_the_smallest_change_comes_first(compose: Compose) -> None:
    ways = advice(plan_run(run_of(compose, *REFUSED["large micro-batches"])))
    assert ways[0].partition(" (")[0] == "sft.micro_batch_size=1"
    ways = advice(plan_run(run_of(compose, *REFUSED["stage 2 of a large model"])))
    assert ways[0].partition(" (")[0] == "zero=auto"


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("adapters in the last phase only", "lora=all"),
        ("adapters of another rank", "lora.roles=[sft,reward,actor,critic]"),
    ],
)
def test_more_adapters_come_before_more_nodes(name: str, first: str, compose: Compose) -> None:
    ways = advice(plan_run(run_of(compose, *REFUSED[name])))
    assert ways[0].partition(" (")[0] == first
    assert ways[-1].startswith("hardware.nodes=2 ")


def test_random_weights_take_no_adapters(compose: Compose) -> None:
    config = changed(run_of(compose, *REFUSED["one GPU"]), model={"init": ModelInit.random})
    assert "lora=all" not in " ".join(advice(plan_run(config)))


def test_what_is_set_already_is_not_proposed(compose: Compose) -> None:
    given = ["model=opt_13b", "hardware=a100_80g", "lora=all"]
    config = run_of(compose, *given, "model.gradient_checkpointing=true")
    for way in advice(plan_run(config)):
        assert "lora=" not in way
        assert "checkpointing" not in way
        assert "zero=auto" not in way


def test_adapters_are_for_all_phases_that_run(compose: Compose) -> None:
    given = ["model=opt_13b", "hardware=a100_80g"]
    whole = " ".join(advice(plan_run(run_of(compose, *given))))
    assert "lora=all" in whole
    assert "lora=default" not in whole
    ppo = ["phase=ppo", "model@reward_model=opt_1.3b"]
    last = " ".join(advice(plan_run(run_of(compose, *given, *ppo))))
    assert "lora=default" in last


def test_a_shared_trunk_takes_no_adapters(compose: Compose) -> None:
    config = run_of(compose, "model=opt_13b", "hardware=a6000_48g")
    trunk = changed(config, ppo={"shared_trunk": True, "num_layers_unfrozen": 2})
    assert "lora" not in " ".join(advice(plan_run(trunk)))


def test_nodes_are_doubled_up_to_the_first_that_fits(compose: Compose) -> None:
    config = run_of(compose, "model=opt_66b", "hardware=8xa100_40g")
    (way,) = [way for way in advice(plan_run(config)) if "nodes" in way]
    nodes = int(way.partition("hardware.nodes=")[2].partition(" ")[0])
    assert nodes in (2, 4, 8, 16, 32, 64, 128)
    assert plan_run(changed(config, hardware={"nodes": nodes})).fits
    assert not plan_run(changed(config, hardware={"nodes": nodes // 2})).fits


def test_a_cpu_has_no_other_nodes(compose: Compose) -> None:
    config = run_of(compose, "hardware.memory_gib=0.8")
    assert "nodes" not in " ".join(advice(plan_run(config)))


def test_where_nothing_helps_nothing_is_said(compose: Compose) -> None:
    assert advice(plan_run(run_of(compose, "hardware.memory_gib=0.1"))) == []


def test_settings_in_words(compose: Compose) -> None:
    config = run_of(compose, "model=opt_1.3b", "hardware=8xa100_80g", "zero=stage3")
    assert plan_run(config).zero_text == "ZeRO stage 3"
    both = changed(config, zero={"critic_stage": 2, "offload_optimizer": True})
    assert plan_run(both).zero_text == "ZeRO stage 3 (critic: stage 2), optimiser offloaded"
    ema = {"ppo": {"ema_beta": 0.99}}
    offloads = ("optimizer", "parameters", "reference", "reward", "ema")
    everything = {f"offload_{name}": True for name in offloads}
    assert plan_run(changed(config, zero=everything, **ema)).zero_text == (
        "ZeRO stage 3, optimiser and weights and reference and reward model and moving average "
        "offloaded"
    )
    # With adapters there is no reference to offload.
    adapted = changed(config, zero={"offload_reference": True}, lora={"rank": 8})
    assert plan_run(adapted).zero_text == "ZeRO stage 3"
