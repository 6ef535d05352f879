"""DPO learns what it should of ragged pairs, however a step is cut."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhf.config.choices import Phase
from rlhf.data.splits import phase_of_dpo_prompts
from rlhf.models.build import build_actor
from rlhf.models.language_model import LanguageModel
from rlhf.phases.dpo import DpoTrainer, run_dpo
from rlhf.phases.shared.context import RunContext, phase_prompts, phase_tokens
from rlhf.phases.shared.policies import policy_source
from tests.algorithms import loop_reference as reference
from tests.models_on_disk import disturb
from tests.phases.ppo.ppo_pieces import assert_gradient
from tests.phases.run_pieces import Judge, Make

SHORT = ["phase=dpo", "dpo.batch_size=6", "dpo.micro_batch_size=2", "dpo.epochs=1"]
SHORT += ["dpo.beta=0.5", "dpo.eval_prompts=3", "rollout.max_response_tokens=4"]
SHORT += ["model.dropout=0.3"]  # of SFT: DPO learns without, or policy and base would differ


def response_logprob(module: nn.Module, ids: list[int], prompt_tokens: int) -> Tensor:
    logs_SV = module.pretrained(torch.tensor([ids])).logits[0].log_softmax(-1)
    places = range(prompt_tokens, len(ids))
    return torch.stack([logs_SV[place - 1, ids[place]] for place in places]).sum()


def pair_logprobs(module: nn.Module, rows: dict[str, list[Any]]) -> tuple[Tensor, Tensor]:
    sides = []
    for side in ("chosen_ids", "rejected_ids"):
        pairs = zip(rows[side], rows["prompt_tokens"], strict=True)
        sides.append(torch.stack([response_logprob(module, ids, n) for ids, n in pairs]))
    return sides[0], sides[1]


def pair_rows(context: RunContext) -> Any:
    return phase_tokens(context, Phase.dpo)


def base_of(context: RunContext) -> nn.Module:
    return LanguageModel(
        build_actor(policy_source(context.config), context.tokenizer, seed=1)
    ).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "smoothing", "buckets"), [("none", 0.25, True), ("default", 0.0, False)]
)
def test_a_step_has_the_gradient_of_the_mean_over_pairs(
    made: Make, lora: str, smoothing: float, *, buckets: bool
) -> None:
    context, _ = made(
        f"lora={lora}", f"dpo.label_smoothing={smoothing}", f"data.bucket_by_length={buckets}"
    )
    rows = pair_rows(context).train[:6]
    assert len({len(ids) for ids in rows["chosen_ids"]}) > 1
    trainer = DpoTrainer(context, total_steps=1)
    trainer.policy.lr = 0.0
    start = trainer.train_step(rows)
    assert start["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert start["dpo/margin"] == pytest.approx(0, abs=1e-5)
    disturb(trainer.policy.module, size=0.2)
    values = trainer.train_step(rows)

    policy, base = trainer.policy.module, base_of(context)
    chosen_B, rejected_B = pair_logprobs(policy, rows)
    with torch.no_grad():
        base_chosen_B, base_rejected_B = pair_logprobs(base, rows)
    margins_B = 0.5 * ((chosen_B - base_chosen_B) - (rejected_B - base_rejected_B))
    losses_B = -(1 - smoothing) * functional.logsigmoid(margins_B)
    losses_B = losses_B - smoothing * functional.logsigmoid(-margins_B)
    assert margins_B.abs().max() > 0.01
    assert_gradient(trainer.policy.gradients[1], losses_B.mean(), policy)
    assert len(trainer.policy.gradients) == 2

    table = torch.stack([chosen_B, rejected_B, base_chosen_B, base_rejected_B], dim=1)
    slow = reference.dpo_losses(table.tolist(), beta=0.5, label_smoothing=smoothing)
    expected = {
        "dpo/loss": math.fsum(slow) / 6,
        "dpo/accuracy": (margins_B > 0).double().mean().item(),
        "dpo/margin": margins_B.mean().item(),
        "dpo/chosen_reward": 0.5 * (chosen_B - base_chosen_B).mean().item(),
        "dpo/rejected_reward": 0.5 * (rejected_B - base_rejected_B).mean().item(),
        "dpo/learning_rate": 0.5,
        "dpo/grad_norm": 2.0,
        "dpo/skipped_steps": 0.0,
    }
    assert {n: values[n] for n in expected} == pytest.approx(expected, abs=1e-4, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [1, 100])
def test_an_evaluation_counts_every_held_out_pair_once(made: Make, examples: int) -> None:
    context, _ = made(f"dpo.eval_examples={examples}")
    held_out = pair_rows(context).eval
    trainer = DpoTrainer(context, total_steps=1)
    disturb(trainer.policy.module, size=0.2)
    accuracy, loss = trainer.evaluate(held_out)
    count = min(examples, len(held_out))
    rows = held_out[:count]
    with torch.no_grad():
        policy = torch.stack(pair_logprobs(trainer.policy.module, rows), dim=1)
        base = torch.stack(pair_logprobs(base_of(context), rows), dim=1)
    losses = reference.dpo_losses(
        torch.cat([policy, base], dim=1).tolist(), beta=0.5, label_smoothing=0.0
    )
    assert accuracy.count.item() == count
    assert loss.value() == pytest.approx(math.fsum(losses) / count, rel=1e-4)
    right = [value < math.log(2) for value in losses]
    assert accuracy.value() == pytest.approx(sum(right) / count)


KEYS = {"accuracy", "accuracy_ci", "kl_before", "kl_after", "kl_to_reference"}
KEYS |= {"ended_share_before", "ended_share_after"}
KEYS |= {"response_tokens_before", "response_tokens_after", "steps", "seconds", "peak_memory_gib"}


def test_what_a_run_of_dpo_tells(made: Make) -> None:
    context, notes = made("dpo.eval_every=1")
    result = run_dpo(context)
    assert set(result) == KEYS
    assert result["steps"] == 2  # 12 pairs, 6 at a time
    assert result["kl_before"] == pytest.approx(0, abs=1e-5)
    assert result["kl_to_reference"] == result["kl_after"] != 0
    low, high = result["accuracy_ci"]
    assert low <= result["accuracy"] <= high
    assert notes.steps_with("dpo/loss") == [1, 2]
    assert notes.steps_with("dpo/eval_loss") == [1, 2]
    assert list(notes.saved) == ["dpo/actor"]
    judged, _ = made()
    gold = ("gold", "exact", "exact_greedy", "gold_parts")
    golds = {f"{name}_{when}" for name in gold for when in ("before", "after")}
    assert set(run_dpo(replace(judged, judge=Judge()))) == KEYS | golds


def test_prompts_of_the_pairs_are_answered_where_ppo_has_no_part(made: Make) -> None:
    context, _ = made()
    assert phase_of_dpo_prompts(context.parts) is Phase.ppo
    pairs = replace(
        context, parts={**context.parts, Phase.ppo: type(context.parts[Phase.ppo])([], [])}
    )
    assert phase_of_dpo_prompts(pairs.parts) is Phase.reward
    assert len(phase_prompts(pairs, phase_of_dpo_prompts(pairs.parts)).eval) > 0
