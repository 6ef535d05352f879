"""KTO learns what it should of marked responses, however a step is divided."""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.config.choices import Phase
from rlhf.options.kto.kto_trainer import KtoTrainer
from rlhf.phases.dpo import run_dpo
from rlhf.phases.shared.context import RunContext, phase_tokens
from tests.models_on_disk import disturb
from tests.options.kto.test_kto_loss import loop_losses
from tests.phases.ppo.ppo_pieces import assert_gradient
from tests.phases.run_pieces import Compose, Notes, run_context
from tests.phases.test_dpo_trainer import KEYS, base_of, response_logprob

SHORT = ["phase=dpo", "dpo.loss=kto", "dpo.batch_size=8", "dpo.epochs=1", "dpo.eval_prompts=3"]
SHORT += ["dpo.beta=0.5", "dpo.desirable_weight=1.5", "rollout.max_response_tokens=4"]
Make = Callable[..., tuple[RunContext, Notes]]


@pytest.fixture
def made(compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(*overrides: str) -> tuple[RunContext, Notes]:
        return run_context(compose, tmp_path, monkeypatch, *SHORT, *overrides)

    return make


def log_ratios(policy: nn.Module, base: nn.Module, rows: list[tuple[list[int], int]]) -> Tensor:
    found = []
    for ids, prompt_tokens in rows:
        with torch.no_grad():
            log_base = response_logprob(base, ids, prompt_tokens)
        found.append(response_logprob(policy, ids, prompt_tokens) - log_base)
    return torch.stack(found)


def slow_reference_point(policy: nn.Module, base: nn.Module, rows: dict[str, list[Any]]) -> float:
    sequences = list(zip(rows["ids"], rows["prompt_tokens"], strict=True))
    following = sequences[1:] + sequences[:1]
    mixed = [
        (ids[:n] + other[m:], n) for (ids, n), (other, m) in zip(sequences, following, strict=True)
    ]
    with torch.no_grad():
        return max(0.0, statistics.fmean(log_ratios(policy, base, mixed).tolist()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "micro", "buckets"), [("none", 2, True), ("none", 8, False), ("default", 4, True)]
)
def test_a_step_has_the_gradient_of_the_mean_over_responses(
    made: Make, lora: str, micro: int, *, buckets: bool
) -> None:
    context, _ = made(
        f"lora={lora}", f"dpo.micro_batch_size={micro}", f"data.bucket_by_length={buckets}"
    )
    rows = phase_tokens(context, Phase.dpo).train[:8]
    assert set(rows["grade"]) == {0.0, 1.0}
    trainer = KtoTrainer(context, total_steps=1)
    trainer.policy.lr = 0.0
    start = trainer.train_step(rows)
    assert start["dpo/reference_point"] == pytest.approx(0, abs=1e-5)
    disturb(trainer.policy.module, size=0.2)
    values = trainer.train_step(rows)

    policy, base = trainer.policy.module, base_of(context)
    z = slow_reference_point(policy, base, rows)
    ratios_B = log_ratios(policy, base, list(zip(rows["ids"], rows["prompt_tokens"], strict=True)))
    marks = [grade == 1 for grade in rows["grade"]]
    signs_B = torch.tensor([1.0 if mark else -1.0 for mark in marks])
    weights_B = torch.tensor([1.5 if mark else 1.0 for mark in marks])
    losses_B = weights_B * (1 - torch.sigmoid(0.5 * signs_B * (ratios_B - z)))
    assert_gradient(trainer.policy.gradients[1], losses_B.mean(), policy)
    slow = loop_losses(ratios_B.tolist(), marks, z, beta=0.5, good=1.5, bad=1.0)
    good = [r for r, mark in zip(ratios_B.tolist(), marks, strict=True) if mark]
    expected = {
        "dpo/loss": math.fsum(slow) / 8,
        "dpo/reference_point": z,
        "dpo/chosen_reward": 0.5 * statistics.fmean(good),
    }
    assert {n: values[n] for n in expected} == pytest.approx(expected, abs=1e-4, rel=1e-4)


def test_the_reference_point_is_above_zero_if_all_responses_became_likelier(made: Make) -> None:
    context, _ = made("dpo.micro_batch_size=3", "dpo.batch_size=6")
    rows = phase_tokens(context, Phase.dpo).train[:6]
    trainer = KtoTrainer(context, total_steps=1)
    with torch.no_grad():  # the reference finds every response unlikely
        for parameter in trainer._reference.module.parameters():
            parameter.mul_(3.0)
    z = slow_reference_point(trainer.policy.module, trainer._reference.module, rows)
    assert z > 1
    assert trainer.train_step(rows)["dpo/reference_point"] == pytest.approx(z, rel=1e-4)


def test_what_a_run_of_kto_tells(made: Make) -> None:
    context, notes = made("dpo.eval_every=3")
    held_out = phase_tokens(context, Phase.dpo).eval
    result = run_dpo(context)
    assert set(result) == KEYS | {"responses"}
    assert result["steps"] == 3  # 24 responses, 8 at a time
    assert result["responses"] == len(held_out) == 8
    low, high = result["accuracy_ci"]
    assert low <= result["accuracy"] <= high
    assert notes.steps_with("dpo/reference_point") == [1, 2, 3]
    assert notes.steps_with("dpo/responses_per_second") == [1, 2, 3]
    assert notes.steps_with("dpo/pairs_per_second") == []
    assert notes.steps_with("dpo/eval_loss") == [3]
