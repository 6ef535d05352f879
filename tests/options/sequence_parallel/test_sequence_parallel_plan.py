"""Plans of SFT whose sequences are shared by ranks."""

from dataclasses import replace

import pytest

from rlhf.config.choices import Device, Phase
from rlhf.config.schema.run import RunConfig
from rlhf.options.sequence_parallel.costs import added_pass_bytes, added_pass_seconds
from rlhf.plan import time_model
from rlhf.plan.phase_plan import PhasePlan
from rlhf.plan.plan import EFFICIENCY, plan_run
from tests.plan.planned import Compose, changed, machine, run_of, use
from tests.zero_settings import zero_config

SIZES = (1, 2, 4)


@pytest.fixture
def long(compose: Compose) -> RunConfig:
    """SFT on sequences of 32,768 tokens."""
    words = ["phase=sft", "model=llama3.1_8b", "hardware=8xa100_80g", "zero=stage3"]
    words += ["sft.batch_size=8", "sft.micro_batch_size=1", "sft.max_tokens=32768"]
    return run_of(compose, *words, "data.size=1000")


def sft_of(config: RunConfig, size: int) -> PhasePlan:
    (phase,) = plan_run(changed(config, zero={"sequence_parallel_size": size})).phases
    return phase


def test_shared_sequences_divide_the_activations(long: RunConfig) -> None:
    one, two, four = (sft_of(long, size) for size in SIZES)
    (model,) = plan_run(long).models[Phase.sft]
    more = added_pass_bytes(model, sequences=1, tokens=32768, size=2)
    assert 0 < more < 0.1 * one.peak_parts["activations"]
    # The peak may be in the output layer or in the last layer, whose slopes differ.
    half = (one.peak_parts["activations"] + more) / 2
    assert two.peak_parts["activations"] == pytest.approx(half, rel=0.01)
    assert four.peak_parts["activations"] == pytest.approx(
        two.peak_parts["activations"] / 2, rel=0.01
    )
    assert one.step_seconds["train"] < two.step_seconds["train"] < 1.5 * one.step_seconds["train"]
    same = ("weights", "optimizer", "buffers", "process")
    assert {part: two.peak_parts[part] for part in same} == {
        part: one.peak_parts[part] for part in same
    }


def test_seconds_of_the_exchange() -> None:
    model = use()
    at = time_model.CostModel(
        machine=machine(),
        zero=zero_config(sequence_parallel_size=2),
        efficiency=replace(EFFICIENCY[Device.cuda], link=0.5, message_seconds=3.0),
    )
    work = time_model.ForwardWork(0.0, 0.0, 7, tokens=10.0)
    # 2 layers of hidden size 8: q, k, v and output in bf16, of which half goes to the other rank.
    moved = 2 * 10 * (4 * 8) * 2 / 2
    expected = moved / (1e5 * 0.5) + 2 * 5 * 7 * 3.0
    assert added_pass_seconds(at, model, work) == pytest.approx(expected)
