"""Seconds worked by hand on a machine of round numbers, and what may never make a run slower."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from rlhf.config.machine_rates import HOST_MEMORY_BANDWIDTH, Machine
from rlhf.config.roles import Role
from rlhf.models.model_uses import ModelUse
from rlhf.plan import time_model
from rlhf.plan.plan import plan_run
from rlhf.plan.time_model import CostModel, Efficiency, ForwardWork, Sampling
from tests.plan.planned import Compose, changed, machine, run_of, use
from tests.zero_settings import zero_config

N = 2816  # weights of the tiny model, 1536 of them in matrices; 800 in the head, tied
SHARES = ("training", "scoring", "sharded", "bandwidth", "attention", "link")
PERFECT = Efficiency(**dict.fromkeys(SHARES, 1.0), layer_seconds=0.0, message_seconds=0.0)


def setting(
    *, of: Machine | None = None, efficiency: Efficiency = PERFECT, **zero: Any
) -> CostModel:
    return CostModel(machine=of or machine(), zero=zero_config(**zero), efficiency=efficiency)


def gathering(at: CostModel, model: ModelUse | None = None, **how: Any) -> float:
    return time_model.gather_weights_seconds(at, model or use(), **how)


def reading(at: CostModel, flops: float, *, passes: int, **work: Any) -> float:
    return time_model.no_grad_pass_seconds(at, use(), ForwardWork(flops, 0, passes, **work))


def training(at: CostModel, flops: float, *, passes: int) -> float:
    return time_model.training_seconds(at, use(), ForwardWork(flops, 0, passes))


def sampling(at: CostModel, **changes: Any) -> float:
    return time_model.sampling_seconds(at, use(), replace(SAMPLED, **changes))


SAMPLED = Sampling(
    responses=6, rows=2, prompt_tokens=5, response_tokens=4, tensor_parallel=1, gathers=False
)


def test_operations_of_a_forward_pass() -> None:
    # 3 sequences of 5 tokens: 2 * 1536 for each token, attention 2 * 2 layers * 8 * 5 * 5 for each
    # sequence, and 2 * 100 * 8 for each of its 4 positions with logits.
    found = time_model.forward_flops(use(), sequences=3, tokens=5, positions=4)
    assert found == 3 * (5 * 3072 + 800 + 4 * 1600)
    scorer = time_model.forward_flops(use(Role.critic), sequences=3, tokens=5, positions=4)
    assert scorer == 3 * (5 * 3072 + 800 + 4 * 16)
    adapted = time_model.forward_flops(use(extra_weights=100), sequences=1, tokens=1, positions=0)
    assert adapted == 2 * 1636 + 32


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 2.0),
        ({"checkpointed": 1}, 2.5),
        ({"checkpointed": 2}, 3.0),
        ({"trained": N // 2}, 1.5),
        ({"layers": 1, "trained": N // 4}, 0.75),  # the lower half of a shared trunk
    ],
)
def test_the_backward_pass(changes: dict[str, Any], share: float) -> None:
    assert time_model.backward_to_forward_ratio(use(**changes)) == share


def test_gathering_sharded_weights() -> None:
    for stage in (0, 1, 2):
        assert gathering(setting(stage=stage)) == 0, "they are whole already"
    # 2 nodes of 2: half of 2 N bytes comes over the slower network, at 1e4 bytes per second.
    assert gathering(setting(stage=3)) == pytest.approx(N / 1e4)
    assert gathering(setting(stage=3), within_node=True) == pytest.approx(N / 1e5)
    alone = setting(of=machine(ranks=4, nodes=1), stage=3)
    assert gathering(alone) == pytest.approx(2 * N * 3 / 4 / 1e5)
    assert gathering(setting(stage=3, quantize_weights=True)) == pytest.approx(N / 2 / 1e4)
    latency = setting(stage=3, efficiency=replace(PERFECT, message_seconds=0.25, link=0.5))
    assert gathering(latency) == pytest.approx(2 * N / 1e4 + 2 * 0.25)


def test_offloaded_weights_come_over_the_hosts_link_or_from_nvme() -> None:
    gathered = N / 1e4
    host = setting(stage=3, offload_parameters=True)
    assert gathering(host) == pytest.approx(gathered + 2 * N / 4 / 1e4)
    nvme = setting(stage=3, offload_parameters=True, nvme_path="x")
    assert gathering(nvme) == pytest.approx(gathered + 2 * N / 2 / 1e3)
    # A frozen model has its own key, and stays in the host's memory.
    reference = use(Role.reference)
    assert gathering(host, reference) == pytest.approx(gathered)
    own = setting(stage=3, offload_reference=True, nvme_path="x")
    assert gathering(own, reference) == pytest.approx(gathered + 2 * N / 4 / 1e4)


def test_reading_computes_while_weights_come() -> None:
    at = setting(stage=3, efficiency=replace(PERFECT, scoring=0.5, sharded=0.8))
    assert reading(at, 4e5, passes=1) == pytest.approx(1.0)
    assert reading(at, 4e4, passes=5) == pytest.approx(5 * N / 1e4)
    slow = replace(at, efficiency=replace(at.efficiency, sharded_layer_seconds=0.25))
    assert reading(slow, 4e5, passes=3) == pytest.approx(1.0 + 3 * 2 * 0.25)
    # Weights that are not gathered make nobody wait.
    plain = replace(at, zero=zero_config(stage=2))
    assert reading(plain, 4e5, passes=1) == pytest.approx(0.8)


def test_scoring_and_training_reach_shares_of_their_own() -> None:
    shares = replace(PERFECT, scoring=0.5, training=0.25)
    at = setting(of=machine(ranks=1, nodes=1), efficiency=shares, stage=0)
    assert reading(at, 1e5, passes=1) == pytest.approx(0.1 / 0.5)
    adam = time_model.optimizer_seconds(at, use())
    assert training(at, 1e5, passes=1) - adam == pytest.approx(3 * 0.1 / 0.25)


def test_few_tokens_do_not_fill_a_gpu() -> None:
    # The machine computes 1 FLOP per byte, so passes of 6 tokens reach half of the rate.
    at = setting(of=machine(ranks=1, nodes=1), efficiency=replace(PERFECT, filling=6.0), stage=0)
    for passes, size, seconds in ((5, 6, 2.0), (2, 18, 1 + 6 / 18), (1, 594, 1 + 6 / 594)):
        found = reading(at, 1e6, passes=passes, tokens=passes * size)
        assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("stage", "sums", "adam"),
    [
        (0, 2 * 2 * N / 1e4, 28 * N / 1e6),  # fp32 gradients, summed for all ranks, once
        (1, 2 * N / 1e4, 28 * N / 4 / 1e6 + N / 1e4),  # weights come back from their ranks
        (2, 3 * N / 1e4, 28 * N / 4 / 1e6 + N / 1e4),  # to one rank only, at every micro-batch
        (3, 3 * N / 1e4 + 3 * 2 * N / 1e4, 28 * N / 4 / 1e6),  # weights twice in each as well
    ],
)
def test_communication_of_a_training_step(stage: int, sums: float, adam: float) -> None:
    compute = 3 * 1e5 / 1e6
    found = training(setting(stage=stage, overlap_comm=False), 1e5, passes=3)
    assert found == pytest.approx(compute + sums + adam)
    hidden = training(setting(stage=stage, overlap_comm=True), 1e5, passes=3)
    assert hidden == pytest.approx(max(compute, sums) + adam)


@pytest.mark.parametrize(
    ("key", "nodes", "saved"),
    [
        # The second copy of a node saves the backward pass the network.
        ({"hpz_partition_size": 2}, 2, N / 1e4 - N / 1e5),
        # Gradients in int4 instead of 2 bytes; on one node they are not quantised.
        ({"quantize_gradients": True}, 2, N / 1e4 * 3 / 4),
        ({"quantize_gradients": True}, 1, 0),
    ],
)
def test_what_zeropp_saves(key: dict[str, Any], nodes: int, saved: float) -> None:
    of = machine(nodes=nodes)
    plain, found = (training(setting(of=of, stage=3, **keys), 0, passes=1) for keys in ({}, key))
    assert plain - found == pytest.approx(saved)


def test_the_optimizer_of_a_node_is_the_hosts() -> None:
    alone = machine(ranks=2, nodes=1)
    host = 28 * N / HOST_MEMORY_BANDWIDTH + 2 * 2 * N / 2 / 1e4
    at = setting(of=alone, stage=2, offload_optimizer=True)
    assert time_model.optimizer_seconds(at, use()) == pytest.approx(host + 2 * N / 2 / 1e5)
    at = setting(of=alone, stage=3, offload_optimizer=True, nvme_path="x")
    assert time_model.optimizer_seconds(at, use()) == pytest.approx(host + 24 * N / 1e3)


def test_a_cpus_optimizer_is_in_the_hosts_memory_in_any_case() -> None:
    cpu = machine(is_gpu=False)
    kept = time_model.optimizer_seconds(setting(of=cpu, stage=2), use())
    away = time_model.optimizer_seconds(setting(of=cpu, stage=2, offload_optimizer=True), use())
    assert away == kept


def test_a_rollout() -> None:
    quick = machine(operations=1e8)
    prefill = 6 * (5 * 3072 + 800 + 1600) / 1e8
    weights = 2 * N / 1e6  # a step reads them once; its products are less
    cached = 2 * 7 * 32 * 2 / 1e6  # 2 rows of 5 to 9 tokens, 32 numbers each
    found = sampling(setting(of=quick, stage=1))
    assert found == pytest.approx(prefill + 3 * 4 * (weights + cached))
    halves = sampling(setting(of=quick, stage=1), shared=2)
    assert found - halves == pytest.approx(prefill / 2), "responses to a prompt share its prefill"
    worse = replace(PERFECT, layer_seconds=0.1, attention=0.5, step_seconds=0.5)
    later = sampling(setting(of=quick, stage=1, efficiency=worse), layer_factor=6.0)
    assert later - found == pytest.approx(3 * 4 * (cached + 2 * 0.1 * 6 + 0.5))


def test_many_rows_are_bound_by_products() -> None:
    step = 100 * (3072 + 32 + 1600) / 1e6
    prefill = 100 * (5 * 3072 + 800 + 1600) / 1e6
    cached = 100 * 7 * 32 * 2 / 1e6
    found = sampling(setting(stage=1), responses=100, rows=100)
    assert found == pytest.approx(prefill + 4 * (step + cached))


def test_sharded_weights_come_once_or_at_every_token() -> None:
    plain, at, whole = sampling(setting(stage=1)), setting(stage=3), N / 1e4
    assert sampling(at, gathers=True) - plain == pytest.approx(whole)
    assert sampling(at) - plain == pytest.approx(3 * 4 * whole)


def test_tensor_parallel_ranks_read_a_part_and_send_the_rest() -> None:
    at = setting(of=machine(operations=1e8, link=1e6), stage=1)
    message = 2 * 2 * 8 * 2 / 1e6  # 2 ranks of 2 rows, 8 numbers
    less = sampling(at, tensor_parallel=2) - sampling(at)
    assert less == pytest.approx(12 * (-N / 1e6 + 2 * 2 * message))


@pytest.mark.slow
def test_more_ranks_are_never_slower_at_the_same_batch(compose: Compose) -> None:
    config = changed(
        run_of(compose, "model=opt_1.3b", "hardware=8xa100_80g", "zero=stage2"),
        ppo={"rollout_batch_size": 1024, "mini_batch_size": 1024},
        sft={"batch_size": 64},
        reward={"batch_size": 64},
    )
    plans = [
        plan_run(changed(config, hardware={"ranks_per_node": ranks})) for ranks in (1, 2, 4, 8)
    ]
    for fewer, more in pairwise(plans):
        for before, after in zip(fewer.phases, more.phases, strict=True):
            assert sum(after.step_seconds.values()) <= sum(before.step_seconds.values())
