"""What is said to fit really fits, once it is typed."""

import shlex
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.choices import ModelInit
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.run import RunConfig
from rlhf.config.validation import validate
from rlhf.options.lora.costs import propose_adapters
from rlhf.plan.advice import find_fitting_overrides
from rlhf.plan.plan import plan_run
from tests.plan.planned import Compose, changed, plan_of, run_of

pytestmark = pytest.mark.slow

LARGE = ("model=opt_13b", "hardware=a100_80g", "phase=sft")
REFUSED = read_yaml_beside(__file__, "ways_out.yaml")


def ways_of(config: RunConfig) -> str:
    """The changes with which a run fits, in one text."""
    return " ".join(find_fitting_overrides(config, partial(plan_run, loads=None)))


@pytest.mark.parametrize("name", REFUSED)
def test_every_way_fits_when_it_is_typed(name: str, compose: Compose) -> None:
    given = REFUSED[name]["typed"].split()
    plan = plan_of(compose, *given)
    assert not plan.fits
    assert plan.fitting_overrides[0].partition(" (")[0] == REFUSED[name]["first"]
    if "lora=default" in given:
        assert plan.fitting_overrides[-1].startswith("hardware.nodes=2 ")
    for way in plan.fitting_overrides:
        words, _, told = way.partition(" (")
        replaced = {word.partition("=")[0] for word in shlex.split(words)}
        kept = [word for word in given if word.partition("=")[0] not in replaced]
        config = to_run_config(compose([*kept, *shlex.split(words)]))
        validate(config)
        again = plan_run(config)
        assert again.fits, way
        assert told.startswith(again.zero_text), way


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], ["lora=all"]),
        (["lora=all"], []),
        (["lora=default"], ["lora=all"]),
        (["lora=default", "lora.rank=8"], ["lora.roles=[sft,reward,actor,critic]"]),
        (["phase=ppo", "model@reward_model=opt_1.3b"], ["lora=default"]),
    ],
)
def test_adapters_are_for_all_phases_that_run(
    words: list[str], found: list[str], compose: Compose
) -> None:
    config = run_of(compose, "model=opt_13b", "hardware=a100_80g", *words)
    assert [saving.words for saving in propose_adapters(config)] == found


def test_what_is_set_already_or_refused_is_not_proposed(compose: Compose) -> None:
    plain = run_of(compose, *LARGE)
    assert "lora=all" in (whole := ways_of(plain))
    assert "checkpointing" in whole
    assert "lora=" not in ways_of(changed(plain, model={"init": ModelInit.random}))
    from_run = replace(plain, from_run="runs/a/b")  # which determines the keys of model
    assert "checkpointing" not in ways_of(from_run)
    given = run_of(compose, *LARGE, "lora=all", "model.gradient_checkpointing=true")
    assert not [word for word in ("lora=", "checkpointing", "zero=auto") if word in ways_of(given)]
    words = ("model=opt_125m", "hardware=a100_80g", "phase=ppo", "model@reward_model=opt_125m")
    trunk = {"shared_trunk": True, "num_layers_unfrozen": 2}
    ways = ways_of(changed(run_of(compose, *words), ppo=trunk))
    assert "checkpointing" in ways
    assert "lora" not in ways, "a shared trunk takes no adapters"


def test_nodes_are_doubled_up_to_the_first_that_fits(compose: Compose) -> None:
    config = run_of(compose, "model=opt_66b", "hardware=8xa100_40g", "phase=sft")
    config = changed(config, hardware={"memory_gib": 24})
    (way,) = (way for way in ways_of(config).split() if "nodes=" in way)
    nodes = int(way.partition("=")[2])
    assert nodes in (2, 4, 8, 16, 32, 64, 128)
    assert plan_run(changed(config, hardware={"nodes": nodes})).fits
    assert not plan_run(changed(config, hardware={"nodes": nodes // 2})).fits


def test_a_cpu_has_no_other_nodes(compose: Compose) -> None:
    assert "nodes" not in ways_of(run_of(compose, "hardware.memory_gib=0.8"))


def test_settings_in_words(compose: Compose) -> None:
    config = run_of(compose, "model=opt_1.3b", "hardware=8xa100_80g", "zero=stage3")
    offloads = ("optimizer", "parameters", "reference", "reward", "ema")
    everything: dict[str, Any] = {f"offload_{name}": True for name in offloads}
    for groups, text in (
        ({}, ""),
        (
            {"zero": {"critic_stage": 2, "offload_optimizer": True}},
            " (critic: stage 2), optimiser offloaded",
        ),
        (
            {"zero": everything, "ppo": {"ema_beta": 0.99}},
            ", optimiser and weights and reference and reward model and moving average offloaded",
        ),
        # With adapters there is no reference to offload.
        ({"zero": {"offload_reference": True}, "lora": {"rank": 8}}, ""),
    ):
        assert plan_run(changed(config, **groups)).zero_text == f"ZeRO stage 3{text}"
