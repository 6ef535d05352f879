"""What a phase takes: micro-batches, rows, the moment that takes most, the parts of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rlhf.config import machine_rates
from rlhf.config.choices import Phase, When
from rlhf.config.machine_rates import GIB, machine_of
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.models.model_uses import costs_of_methods, models_in_phase
from rlhf.options import Backend
from rlhf.plan import memory_model, time_model
from rlhf.plan.memory_model import uses_matmul_attention
from rlhf.plan.phase_costs import bytes_outside_steps, cuda_graph_bytes, plan_phase
from rlhf.plan.phase_memory import KEPT_FREED, PhaseMemory
from rlhf.plan.phase_plan import PhasePlan
from rlhf.plan.plan import EFFICIENCY, plan_run
from rlhf.plan.steps import Load, assume_loads
from rlhf.plan.time_model import CostModel
from tests.plan.planned import Compose, changed, named, run_of

TRUNK = {"shared_trunk": True, "num_layers_unfrozen": 2}
POLICY, SCORER = 1315758080, 331196928  # weights; OPT-350M's head reads 512 numbers
HEAD = 50272 * 2048  # weights of the policy's output layer


def scene(config: RunConfig, phase: Phase, *, steps: int | None = 1) -> PhaseMemory:
    at = CostModel(
        machine=machine_of(config.hardware),
        zero=config.zero,
        efficiency=EFFICIENCY[config.hardware.device],
        methods=tuple(costs_of_methods(config)),
    )
    load = replace(assume_loads(config)[phase], steps=steps)
    models = models_in_phase(config, phase)
    return PhaseMemory(config=config, at=at, phase=phase, models=models, load=load)


def phase(config: RunConfig, of: Phase) -> PhasePlan:
    return plan_phase(scene(config, of))


def unfilled(here: PhaseMemory, tokens: int) -> float:
    """The time of passes of ``tokens`` tokens relative to passes of very many."""
    machine = here.at.machine
    return 1 + here.at.efficiency.filling * machine.operations / machine.bandwidth / tokens


def eight_gpus(compose: Compose, *more: str, **groups: dict[str, Any]) -> RunConfig:
    """A policy of 1.3 B and a scorer of 350 M on eight GPUs, at stage 2."""
    overrides = ("model=opt_1.3b", "model@reward_model=opt_350m", "hardware=8xa100_80g")
    config = run_of(compose, *overrides, "zero=stage2", *more)
    return changed(config, **groups) if groups else config


def test_states_of_all_models_are_resident(compose: Compose) -> None:
    here = scene(eight_gpus(compose), Phase.ppo)
    uses = named(models_in_phase(here.config, Phase.ppo))
    assert (uses["actor"].weights, uses["critic"].weights) == (POLICY, SCORER)
    parts = here.resident_bytes()
    assert parts["weights"] == 2 * (2 * POLICY + 2 * SCORER)
    assert "gradients" not in parts
    assert parts["optimizer"] == 12 * (POLICY // 8 + SCORER // 8)
    assert parts["process"] == int(0.8 * GIB + 0.5 * GIB)  # NCCL


def test_stage_3_frees_neither_gradients_nor_their_buckets(compose: Compose) -> None:
    config = eight_gpus(compose, zero={"stage": 3, "reduce_bucket_size": 1000})
    parts = scene(config, Phase.ppo).resident_bytes()
    assert parts["gradients"] > 0
    assert parts["buffers"] == 2 * 1000 * 2  # actor's and critic's
    mixed = eight_gpus(compose, zero={"critic_stage": 3, "reduce_bucket_size": 1000})
    parts = scene(mixed, Phase.ppo).resident_bytes()
    assert parts["gradients"] == 2 * (SCORER // 8)
    assert parts["buffers"] == 1000 * 2


def test_what_a_cpu_offloads_stays_in_its_memory(compose: Compose) -> None:
    config = run_of(compose, "hardware.memory_gib=8", "hardware.dtype=bf16")
    config = changed(config, zero={"auto": False, "stage": 2, "offload_optimizer": True})
    here = scene(config, Phase.sft)
    (model,) = here.models
    assert here.resident_bytes()["optimizer"] == 12 * model.weights
    assert here.offloaded_bytes == 16 * model.weights  # and gradients in fp32


def test_training_takes_activations_logits_and_buckets(compose: Compose) -> None:
    here = scene(eight_gpus(compose, zero={"reduce_bucket_size": 1000}), Phase.ppo)
    actor = here.models[0]
    parts = here.training_peak(actor, sequences=2, tokens=256, positions=128, passes=2)
    # Numbers of a layer and token: norms 4 h, attention 4 h, the wide part 4 h; h = 2048.
    assert parts - here.resident_bytes() == Counter(
        activations=2 * 256 * 24 * 12 * 2048 * 2 + 2 * 128 * 2048 * 4,
        logits=256 * 50272 * (4 + 4),
        gradients=2 * (POLICY // 8) + 2 * HEAD,
        buffers=2 * 1000 * 2,
    )


def test_autocast_copies_weights_at_stage_0(compose: Compose) -> None:
    config = eight_gpus(compose, zero={"stage": 0})
    here = scene(config, Phase.sft)
    (model,) = here.models
    extra = here.training_peak(model, sequences=1, tokens=64, positions=1, passes=2)
    extra -= here.resident_bytes()
    # Activations in fp32 at most, and a copy in bf16 of every weight of a linear layer.
    slopes = 64 * (2 * 8192 + 2048) * 4
    assert extra["activations"] == 64 * 24 * 12 * 2048 * 4 + slopes + 2 * 24 * 12 * 2048 * 2048


def test_attention_by_matrix_products_works_in_scores(compose: Compose) -> None:
    config = run_of(compose, "hardware.memory_gib=8", "hardware.dtype=bf16", "zero=stage1")
    here = scene(config, Phase.sft)
    (model,) = here.models
    for tokens, is_gpu, is_matmul in ((512, False, True), (513, False, False), (10, True, False)):
        assert uses_matmul_attention(tokens, is_gpu=is_gpu) is is_matmul
    batch, one = {"sequences": 64, "tokens": 100}, 64 * 8 * 100 * 100 * 2
    read = memory_model.no_grad_pass_bytes(here.at, model, **batch)
    extra = here.scoring_peak([model], **batch) - here.resident_bytes()
    assert extra["activations"] == read + 2 * one
    kept = memory_model.activation_bytes(here.at, model, **batch)
    few = here.training_peak(model, **batch, positions=1, passes=2)
    kept = round(KEPT_FREED * kept)  # with what freed blocks of other lengths leave
    assert few["activations"] == kept + 18 * one
    assert few["logits"] == 0  # freed by then


def test_the_larger_of_two_readers_counts(compose: Compose) -> None:
    here = scene(eight_gpus(compose), Phase.ppo)
    uses = {model.role: model for model in here.models}
    shapes = {"sequences": 4, "tokens": 256}
    both = here.scoring_peak([uses[Role.reference], uses[Role.reward]], **shapes)
    assert both == here.scoring_peak([uses[Role.reference]], **shapes)
    assert both.total() > here.scoring_peak([uses[Role.reward]], **shapes).total()


def test_micro_batches_are_chosen_within_the_cap(compose: Compose) -> None:
    batches = {"sft": {"batch_size": 96}, "reward": {"batch_size": 96}}
    config = eight_gpus(compose, hardware={"max_micro_batch_size": 8}, **batches)
    assert phase(config, Phase.sft).micro_batch == 6  # of 12, the largest divisor up to 8
    assert phase(config, Phase.reward).micro_batch == 4  # pairs have two sequences each
    given = changed(config, sft={"micro_batch_size": 3})
    assert phase(given, Phase.sft).micro_batch == 3


def test_a_micro_batch_that_does_not_fit_is_made_smaller(compose: Compose) -> None:
    cap = {"max_micro_batch_size": 8}
    config = eight_gpus(compose, hardware=cap, sft={"batch_size": 64, "max_tokens": 2048})
    whole = phase(config, Phase.sft)
    assert whole.micro_batch == 4  # 8 are less than 5 % faster
    less = changed(config, hardware={"memory_gib": whole.peak_bytes / GIB - 1})
    smaller = phase(less, Phase.sft)
    assert smaller.micro_batch == 2
    assert smaller.peak_bytes <= scene(less, Phase.sft).memory_limit
    # Where none fits, the one that takes least is told.
    none = phase(changed(config, hardware={"memory_gib": 4}), Phase.sft)
    assert none.micro_batch == 1


def test_rows_are_made_fewer_where_the_cache_does_not_fit(compose: Compose) -> None:
    ppo = {"rollout_batch_size": 8 * 200, "mini_batch_size": 8 * 8}
    lengths = {"max_prompt_tokens": 1024, "max_response_tokens": 1024}
    config = eight_gpus(compose, ppo=ppo, rollout=lengths)
    found = phase(config, Phase.ppo)
    assert found.rows is not None
    assert 1 < found.rows < 200
    waves = -(-200 // found.rows)
    assert found.rows == -(-200 // waves)  # waves of equal size
    given = changed(config, rollout=lengths | {"max_rows": 3})
    assert phase(given, Phase.ppo).rows == 3
    plain = changed(config, rollout=lengths | {"backend": Backend.hf})
    assert phase(plain, Phase.ppo).rows == 200  # generate has no rows that wait
    few = changed(config, ppo={"rollout_batch_size": 64, "mini_batch_size": 64})
    assert phase(few, Phase.ppo).rows == 8


def test_the_moment_that_takes_most_is_told(compose: Compose) -> None:
    config = eight_gpus(compose)
    assert phase(config, Phase.ppo).peak_moment == "training of the actor"
    assert phase(config, Phase.sft).peak_moment == "training"


@pytest.mark.parametrize(("top_p", "bytes_per_logit"), [(1.0, 14), (0.9, 21)])
def test_graphs_keep_logits_and_probabilities(
    top_p: float, bytes_per_logit: int, compose: Compose
) -> None:
    here = scene(eight_gpus(compose, f"rollout.top_p={top_p}"), Phase.ppo)
    kept = cuda_graph_bytes(here, Counter(kv_cache=5), rows=8)
    assert kept == Counter(kv_cache=5, logits=8 * 50272 * bytes_per_logit)


def test_dpo_reads_its_reference(compose: Compose) -> None:
    config = eight_gpus(compose)
    config = changed(config, phase={"order": [Phase.sft, Phase.dpo]})
    found = phase(config, Phase.dpo)
    assert set(found.step_seconds) == {"train", "score"}
    assert found.peak_moment == "training"
    assert set(phase(config, Phase.sft).step_seconds) == {"train"}


@pytest.mark.parametrize(
    ("backend", "choice", "gathers"),
    [
        (Backend.fast, When.auto, True),
        (Backend.fast, When.never, False),
        (Backend.hf, When.auto, False),
        (Backend.hybrid_engine, When.auto, True),
    ],
)
def test_whether_sharded_weights_are_made_whole(
    backend: Backend, choice: When, gathers: bool, compose: Compose
) -> None:
    rollout = {"backend": backend, "gather_weights": choice}
    found = phase(eight_gpus(compose, zero={"stage": 3}, rollout=rollout), Phase.ppo)
    assert found.gathers is gathers
    assert not phase(eight_gpus(compose, rollout=rollout), Phase.ppo).gathers  # nothing to gather


def test_a_rollout_layer_by_layer_holds_some_gathered_weights(compose: Compose) -> None:
    small = {"reduce_bucket_size": 1000, "max_live_parameters": 700, "prefetch_bucket_size": 300}
    ppo = {"rollout_batch_size": 1024, "mini_batch_size": 8, "micro_batch_size": 1}
    rollout = {"max_prompt_tokens": 1024, "max_response_tokens": 1024, "max_rows": 128}
    config = eight_gpus(compose, zero={"stage": 3, **small}, ppo=ppo)
    for way, gathered in ((When.never, 700 + 300), (When.always, 0)):
        found = phase(changed(config, rollout=rollout | {"gather_weights": way}), Phase.ppo)
        assert found.peak_moment == "generation"
        assert found.peak_parts["buffers"] == 2 * (2 * 1000 + gathered)  # and actor's and critic's


@pytest.mark.parametrize(
    ("groups", "readings"),
    [
        ({}, 0),
        ({"rollout": {"reuse_logprobs": When.never}}, 1),
        ({"lora": {"rank": 4}}, 1),  # as the reference, without adapters
        ({"lora": {"rank": 4}, "rollout": {"reuse_logprobs": When.never}}, 2),
        ({"lora": {"rank": 4, "train_rest": True}}, 0),
        ({"ppo": TRUNK}, 1),
        # One pass tells of actor, reference and critic.
        ({"ppo": TRUNK, "rollout": {"reuse_logprobs": When.never}}, 1),
    ],
)
def test_how_often_the_actor_reads_a_rollout(
    groups: dict[str, Any], readings: int, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_rates, "LAUNCH_SECONDS", 0.0)
    config = eight_gpus(compose, **groups)
    here = scene(config, Phase.ppo)
    spent = 0.0
    for model in here.models:
        times = readings if model.role is Role.actor else 1
        work = time_model.forward_flops(model, sequences=16, tokens=288, positions=32)
        spent += times * work / here.at.flops_per_second(model, trains=False)
    found = phase(config, Phase.ppo)
    spent *= unfilled(here, found.micro_batch * 288)
    assert found.step_seconds["score"] == pytest.approx(spent)


def test_without_a_reference_dpos_learner_is_read_in_its_place(compose: Compose) -> None:
    order = {"order": [Phase.sft, Phase.dpo]}
    config = eight_gpus(compose, phase=order, lora={"rank": 4})
    (learner,) = models_in_phase(config, Phase.dpo)
    here = scene(config, Phase.dpo)
    settings = config.dpo
    shape = {"sequences": 2 * settings.batch_size // 8, "tokens": settings.max_tokens}
    work = time_model.forward_flops(learner, **shape, positions=settings.max_tokens)
    found = phase(config, Phase.dpo)
    seconds = work / here.at.flops_per_second(learner, trains=False)
    seconds *= unfilled(here, 2 * found.micro_batch * settings.max_tokens)
    assert found.step_seconds["score"] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("override", "branches"),
    [
        ("ppo.value_targets=monte_carlo", 8 * 9),  # of 32 tokens, 9 every 4 tokens
        ("ppo.critic_check.every=8", 32 * 8 / 8 / 128),
    ],
)
def test_branches_are_sampled_from_the_middle_and_scored(
    override: str, branches: float, compose: Compose
) -> None:
    assert "branch" not in phase(eight_gpus(compose), Phase.ppo).step_seconds
    found = phase(eight_gpus(compose, override), Phase.ppo).step_seconds
    whole = found["generate"] / 2 + found["score"]
    assert found["branch"] == pytest.approx(branches * whole)


def evaluating(config: RunConfig, held_out: int = 64) -> float:
    """Seconds of the last phase's evaluations."""
    load = Load(steps=9, lengths=(10,), held_out=held_out)
    plan = plan_run(config, dict.fromkeys(config.phase.order, load))
    return plan.phases[-1].other_seconds["evaluate"]


def test_what_evaluations_take(compose: Compose) -> None:
    pairs, responses = (
        run_of(compose, "phase=reward", f"reward.loss={loss}", f"reward.micro_batch_size={micro}")
        for loss, micro in (("end", 8), ("classification", 16))
    )
    assert evaluating(pairs) == pytest.approx(2 * evaluating(responses))
    ppo = eight_gpus(compose, ppo={"micro_batch_size": 8, "ema_beta": 0.0, "eval_every": 0})
    average = changed(ppo, ppo={"ema_beta": 0.99})
    assert evaluating(average) == pytest.approx(1.5 * evaluating(ppo)), "before, after, average"
    one, many = (changed(ppo, rollout={"max_rows": rows}) for rows in (1, 16))
    assert evaluating(one, 800) > 2 * evaluating(many, 800), "as many rows as in training"


@pytest.mark.parametrize(("rollout", "is_shared"), [("fast", True), ("hf", False)])
def test_responses_to_a_prompt_share_its_prefill(
    rollout: str, compose: Compose, *, is_shared: bool
) -> None:
    one, four = (
        phase(eight_gpus(compose, f"rollout={rollout}", f"ppo.responses_per_prompt={n}"), Phase.ppo)
        for n in (1, 4)
    )
    assert (four.step_seconds["generate"] < one.step_seconds["generate"]) is is_shared


def test_unknown_steps_count_as_one(compose: Compose) -> None:
    config = eight_gpus(compose)
    one = plan_phase(scene(config, Phase.sft, steps=None))
    ten = plan_phase(scene(config, Phase.sft, steps=10))
    assert ten.seconds - sum(ten.other_seconds.values()) == pytest.approx(10 * one.seconds)
    assert one.seconds == pytest.approx(sum(one.step_seconds.values()))


def test_tensor_parallel_generation_holds_a_part_of_the_weights(compose: Compose) -> None:
    rollout = {"backend": Backend.hybrid_engine, "max_rows": 16}
    ppo = {"rollout_batch_size": 128, "mini_batch_size": 8, "micro_batch_size": 1}
    lengths = {"max_prompt_tokens": 1024, "max_response_tokens": 1024}
    config = eight_gpus(compose, zero={"stage": 3}, ppo=ppo, rollout=rollout | lengths)
    engine = config.rollout.hybrid_engine
    halves = changed(
        config, rollout={"hybrid_engine": type(engine)(**vars(engine) | {"inference_tp_size": 2})}
    )
    whole, half = (plan_run(each).phases[-1] for each in (config, halves))
    assert whole.peak_moment == half.peak_moment == "generation"
    assert whole.peak_parts["gathered_weights"] == 2 * POLICY
    assert half.peak_parts["gathered_weights"] == POLICY


def test_every_mini_batch_of_every_epoch_is_an_update(compose: Compose) -> None:
    one = {"rollout_batch_size": 128, "mini_batch_size": 128, "ppo_epochs": 1}
    seconds = [
        phase(eight_gpus(compose, ppo=one | more), Phase.ppo).step_seconds["train"]
        for more in ({}, {"ppo_epochs": 3}, {"ppo_epochs": 3, "mini_batch_size": 64})
    ]
    assert seconds[1] == pytest.approx(3 * seconds[0])
    assert seconds[2] > 1.01 * seconds[1], "each of twice as many updates reduces all gradients"


def test_gradients_exist_until_their_step(compose: Compose) -> None:
    for dtype, of_critic in (("bf16", 0), ("fp16", SCORER // 8)):
        here = scene(eight_gpus(compose, f"hardware.dtype={dtype}"), Phase.ppo)
        actor, critic = here.models[:2]
        assert here.resident_bytes(critic)["gradients"] == 0
        # The critic's wait for the actor's step.
        assert here.resident_bytes(actor)["gradients"] == 2 * of_critic
        few = {"sequences": 1, "tokens": 8, "positions": 4, "passes": 2}
        # The slope of the tied head, and of the embedding, on top of those of the step.
        expected = 2 * (of_critic + POLICY // 8 + 2 * HEAD)
        assert here.training_peak(actor, **few)["gradients"] == expected
        assert here.training_peak(critic, **few)["gradients"] == 2 * (SCORER // 8)


def test_a_first_pass_frees_activations_for_its_gradients(compose: Compose) -> None:
    words = ("model=opt_1.3b", "hardware=a100_40g", "hardware.fp32_logits=never", "zero=stage1")
    here = scene(run_of(compose, *words), Phase.sft)
    (model,) = here.models

    def peak(passes: int, sequences: int) -> Counter[str]:
        shapes = {"sequences": sequences, "tokens": 256, "positions": 256}
        return here.training_peak(model, **shapes, passes=passes) - here.resident_bytes()

    stored = 256 * 24 * 12 * 2048 * 2
    slopes = 256 * (2 * 8192 + 2048) * 2  # more than those of the output layer
    activations = 32 * (stored + slopes)
    assert peak(1, 32) == Counter(gradients=2 * HEAD, activations=activations)
    assert peak(2, 32) == Counter(gradients=2 * (POLICY + HEAD), activations=activations)
    # Few activations are gone when the last gradients come.
    assert peak(1, 1) == Counter(gradients=2 * (POLICY + HEAD))


def test_deepspeed_tries_its_optimizer_while_it_is_built(compose: Compose) -> None:
    words = ("phase=sft", "model=opt_1.3b", "hardware=a100_40g", "zero=stage1")
    for dtype, built, later in (("bf16", 2 + 10, 2 + 10), ("fp16", 2 + 4 + 4, 2 + 12)):
        here = scene(run_of(compose, *words, f"hardware.dtype={dtype}"), Phase.sft)
        found = bytes_outside_steps(here)
        sizes = {name: parts.total() - parts["process"] for name, parts in found.items()}
        assert sizes == {"building": built * POLICY, "between steps": later * POLICY}
