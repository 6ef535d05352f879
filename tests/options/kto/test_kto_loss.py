"""KTO's loss and its mismatched responses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms.dpo import sequence_logprobs
from rlhf.options.kto.kto_trainer import kto_loss, mismatch_responses
from tests.algorithms import loop_reference as reference
from tests.algorithms.padded_batches import assert_close, f64, keeps, normal, quick, seeds


def loop_losses(
    ratios: list[float], marks: list[bool], z: float, *, beta: float, good: float, bad: float
) -> list[float]:
    """Equations 7 and 8 of https://arxiv.org/abs/2402.01306, one response after another."""
    found = []
    for ratio, is_good in zip(ratios, marks, strict=True):
        weight = good if is_good else bad
        value = weight / (1 + math.exp(-beta * (ratio - z if is_good else z - ratio)))
        found.append(weight - value)
    return found


def test_the_loss_by_hand() -> None:
    # beta 0.5, z 1. good: log ratio 3, 2 * (1 - sigmoid(0.5 * 2)) = 0.5378828
    # bad: log ratio -1, 3 * (1 - sigmoid(0.5 * 2)) = 0.8068243
    # slopes: -2 * 0.5 * s * (1 - s) = -0.1966119, and 3 * 0.5 * s * (1 - s) = 0.2949179
    ratios_B = f64(3, -1).requires_grad_()
    found = kto_loss(
        ratios_B,
        torch.tensor([True, False]),
        reference_point=1.0,
        beta=0.5,
        desirable_weight=2.0,
        undesirable_weight=3.0,
    )
    found.loss.backward()
    assert_close(found.loss.detach(), 0.5378828 + 0.8068243, atol=1e-6)
    assert_close(ratios_B.grad, [-0.1966119, 0.2949179], atol=1e-6)
    assert_close(found.chosen_reward.value(), 1.5)
    assert_close(found.rejected_reward.value(), -0.5)


@quick
@given(keep=keeps(), seed=seeds, beta=st.floats(0.05, 1), z=st.floats(0, 4))
def test_the_loss_agrees_with_a_loop_over_masked_tokens(
    keep: Tensor, seed: int, beta: float, z: float
) -> None:
    logits_BSV = normal(*keep.shape, 7, seed=seed).double().requires_grad_()
    base_BSV = normal(*keep.shape, 7, seed=seed + 1).double()
    ids_BS = normal(*keep.shape, 7, seed=seed + 2).argmax(dim=-1)
    is_good_B = normal(len(keep), seed=seed + 3) > 0
    rows_N, columns_N = keep[:, 1:].nonzero(as_tuple=True)
    places = (rows_N, columns_N, ids_BS[rows_N, columns_N + 1])
    policy_B, base_B = (
        sequence_logprobs(each.log_softmax(-1)[places], rows_N, num_rows=len(keep))
        for each in (logits_BSV, base_BSV)
    )
    found = kto_loss(
        policy_B - base_B,
        is_good_B,
        reference_point=z,
        beta=beta,
        desirable_weight=1.25,
        undesirable_weight=0.75,
    )
    found.loss.backward()

    def total(rows: reference.Rows) -> float:
        logits = torch.tensor(rows, dtype=torch.float64).view(logits_BSV.shape).tolist()
        lists = ids_BS.tolist(), keep.tolist()
        policy = reference.sequence_logprobs(logits, *lists)
        base = reference.sequence_logprobs(base_BSV.tolist(), *lists)
        ratios = [p - q for p, q in zip(policy, base, strict=True)]
        marks = is_good_B.tolist()
        return math.fsum(loop_losses(ratios, marks, z, beta=beta, good=1.25, bad=0.75))

    rows = logits_BSV.detach().flatten(1).tolist()
    assert_close(found.loss.detach(), total(rows))
    assert_close(found.mean_loss.value(), total(rows) / len(keep))
    few = [row[:3] for row in rows]  # finite differences by some logits of the first token

    def total_of_few(moved: reference.Rows) -> float:
        return total([[*new, *row[len(new) :]] for new, row in zip(moved, rows, strict=True)])

    slopes = logits_BSV.grad.flatten(1)[:, : len(few[0])]
    assert_close(slopes, reference.gradient(total_of_few, few), atol=1e-7)


def test_far_responses_neither_overflow_nor_give_no_number() -> None:
    ratios_B = torch.tensor([-2000.0, 2000.0, 2000.0, -2000.0], requires_grad=True)
    marks_B = torch.tensor([True, True, False, False])
    found = kto_loss(ratios_B, marks_B, reference_point=0.0, beta=1.0)
    found.loss.backward()
    assert_close(found.loss.detach(), 2.0)
    assert ratios_B.grad.isfinite().all()


def test_each_prompt_gets_the_next_response_and_none_is_too_long() -> None:
    rows = {"ids": [[1, 2, 10], [3, 20, 21, 22], [4, 5, 6, 30]], "prompt_tokens": [2, 1, 3]}
    found = mismatch_responses(rows, max_tokens=4)
    assert found["ids"] == [[1, 2, 20, 21], [3, 30], [4, 5, 6, 10]]
    assert found["prompt_tokens"] == [2, 1, 3]
    assert found["length"] == [4, 2, 4]


@pytest.mark.parametrize("z", [0.0, 2.5])
def test_equal_weights_halve_at_the_reference_point(z: float) -> None:
    found = kto_loss(f64(z, z), torch.tensor([True, False]), reference_point=z, beta=0.3)
    assert_close(found.loss, 1.0)
