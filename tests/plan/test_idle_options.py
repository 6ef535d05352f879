"""ZeRO++ and MixZ++ options that save nothing in a run are named before it starts."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from rlhf.config.choices import PlanMode
from rlhf.plan.advice import describe_idle_options
from rlhf.plan.plan import plan_and_configure
from rlhf.plan.plan_tables import render_plan
from tests.plan.planned import Compose, changed, run_of

ZEROPP = ("model=opt_1.3b", "hardware=8xa100_80g", "zero=stage3_zeropp")
KEYS = ["zero.hpz_partition_size=8", "zero.quantize_gradients=true"]


def named(notes: object) -> list[str]:
    """The key and value that each note begins with."""
    return [str(note).partition(" ")[0] for note in notes]  # type: ignore[attr-defined]


def test_zeropp_on_one_node(compose: Compose) -> None:
    zeropp = run_of(compose, *ZEROPP)
    assert named(describe_idle_options(zeropp)) == KEYS
    assert not list(describe_idle_options(changed(zeropp, hardware={"nodes": 2})))
    part = changed(zeropp, zero={"hpz_partition_size": 4, "quantize_gradients": False})
    (found,) = describe_idle_options(part)
    assert found.startswith("zero.hpz_partition_size=4 on one node only costs memory, 1/4 of the ")
    (found,) = describe_idle_options(
        changed(part, hardware={"ranks_per_node": 2}, zero={"hpz_partition_size": 2})
    )
    assert found.endswith("has no effect: the 2 ranks already hold all weights between them")


def test_frozen_weights_need_a_model_under_adapters(compose: Compose) -> None:
    words = ("hardware.nodes=2", "hardware.dtype=fp16", "zero=stage3_mixzpp", "lora=default")
    mixed = run_of(compose, *ZEROPP[:2], *words)
    assert not list(describe_idle_options(mixed))
    sft = changed(mixed, phase={"order": mixed.phase.order[:1]})
    assert named(describe_idle_options(sft)) == ["zero.quantize_frozen_weights=true"]


@pytest.mark.parametrize("plan", PlanMode)
def test_every_launch_prints_them(plan: PlanMode, compose: Compose) -> None:
    decision = plan_and_configure(replace(run_of(compose, *ZEROPP), plan=plan))
    assert named(decision.notes) == KEYS
    if decision.plan is not None:
        console = Console(file=io.StringIO(), width=200)
        console.print(*render_plan(decision.plan))
        assert isinstance(console.file, io.StringIO)
        assert decision.notes[0] in " ".join(console.file.getvalue().split())
