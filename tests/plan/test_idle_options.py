"""ZeRO++ and MixZ++ options that save nothing in a run are named before it starts."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from rlhf.config.choices import PlanMode
from rlhf.config.schema.run import RunConfig
from rlhf.plan.advice import idle_options
from rlhf.plan.decide import plan_and_configure
from rlhf.plan.plan_tables import tables
from tests.plan.planned import Compose, changed, run_of

pytestmark = pytest.mark.slow

SECOND_COPY = (
    "zero.hpz_partition_size=8 on one node has no effect: the 8 ranks already hold all weights "
    "among them"
)
GRADIENTS = (
    "zero.quantize_gradients=true has no effect on one node: DeepSpeed 0.19.8 quantizes gradients "
    "only if there are several nodes"
)


@pytest.fixture
def zeropp(compose: Compose) -> RunConfig:
    return run_of(compose, "model=opt_1.3b", "hardware=8xa100_80g", "zero=stage3_zeropp")


def test_zeropp_on_one_node(zeropp: RunConfig) -> None:
    assert list(idle_options(zeropp)) == [SECOND_COPY, GRADIENTS]
    assert not list(idle_options(changed(zeropp, hardware={"nodes": 2})))


def test_a_second_copy_in_part_of_a_node_only_costs_memory(zeropp: RunConfig) -> None:
    (found,) = idle_options(
        changed(zeropp, zero={"hpz_partition_size": 4, "quantize_gradients": False})
    )
    assert found.startswith("zero.hpz_partition_size=4 on one node only costs memory, 1/4 of the ")


def test_frozen_weights_need_a_model_under_adapters(compose: Compose) -> None:
    mixed = run_of(
        compose,
        "model=opt_1.3b",
        "hardware=8xa100_80g",
        "hardware.nodes=2",
        "hardware.dtype=fp16",
        "zero=stage3_mixzpp",
        "lora=default",
    )
    assert not list(idle_options(mixed))
    (found,) = idle_options(changed(mixed, phase={"order": mixed.phase.order[:1]}))
    assert found.startswith(
        "zero.quantize_frozen_weights=true has no effect: lora.roles=[actor,critic] names no model"
    )


@pytest.mark.parametrize("plan", PlanMode)
def test_every_launch_prints_them(plan: PlanMode, zeropp: RunConfig) -> None:
    decision = plan_and_configure(replace(zeropp, plan=plan))
    assert decision.notes == (SECOND_COPY, GRADIENTS)
    if decision.plan is not None:
        console = Console(file=io.StringIO(), width=200)
        console.print(*tables(decision.plan))
        assert isinstance(console.file, io.StringIO)
        assert SECOND_COPY in " ".join(console.file.getvalue().split())
