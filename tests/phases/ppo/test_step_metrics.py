"""Metrics of a rollout that need more than a mean."""

import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from rlhf.base.metrics import Mean
from rlhf.base.types import PromptBatch, Responses
from rlhf.options import PpoConfig
from rlhf.phases.ppo.step_metrics import (
    early_end_reason,
    equal_scores_mask,
    same_response_mask,
    update_score_average,
    values_to_log,
)


def test_the_same_response_is_the_commonest_that_different_prompts_got() -> None:
    ids_BP = torch.tensor([[0, 5], [0, 5], [6, 5], [7, 7], [8, 8], [9, 9], [9, 9], [9, 9], [9, 9]])
    attend_BP = torch.tensor([[0, 1], [0, 1], *[[1, 1]] * 7]).bool()
    # Rows 0 and 1 answer one prompt, and row 2 equals them; row 3 does not, up to its padding.
    # Rows 4 and 5 are equal too, but fewer; rows 6 to 8 are more, but of one prompt.
    ids_BT = torch.tensor(
        [[3, 4, 9], [3, 4, 0], [3, 4, 1], [3, 4, 1], [4, 3, 2], [4, 3, 5], *[[7, 7, 7]] * 3]
    )
    keep_BT = torch.tensor([*[[1, 1, 0]] * 3, [1, 1, 1], *[[1, 1, 0]] * 5]).bool()
    prompts = PromptBatch(ids_BP, attend_BP, torch.zeros(9, 3), [""] * 9)
    same_B = same_response_mask(prompts, Responses(ids_BT, keep_BT, torch.ones(9).bool()))
    assert same_B.tolist() == [True, True, True, *[False] * 6]


def test_one_prompt_may_get_the_same_response_often() -> None:
    ids = torch.ones(4, 2).long()
    keep = torch.ones(4, 2).bool()
    prompts = PromptBatch(ids, keep, torch.zeros(4, 2), [""] * 4)
    assert not same_response_mask(prompts, Responses(ids, keep, keep[:, 0])).any()


def test_a_group_of_equal_scores_teaches_nothing() -> None:
    scores_GR = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1e4, 1e4 + 1e-3], [0.0, 1e-3]])
    assert equal_scores_mask(scores_GR).tolist() == [True, False, True, False]


def test_a_mean_of_no_token_is_not_logged() -> None:
    nothing = Mean.of(torch.ones(2, 3), torch.zeros(2, 3).bool())
    values = values_to_log({"ppo/entropy": nothing, "ppo/score": Mean.of(torch.zeros(2))}, [])
    assert "ppo/entropy" not in values
    assert values["ppo/score"] == 0


def test_the_average_leaves_out_what_is_not_finite() -> None:
    average = update_score_average(update_score_average(None, math.nan), 2.0)
    assert average == 2.0
    assert update_score_average(average, math.nan) == update_score_average(average, math.inf) == 2.0
    assert update_score_average(average, 3.0) == pytest.approx(2.1)


def test_a_kl_that_is_not_a_number_is_not_above_a_limit() -> None:
    config = cast("PpoConfig", SimpleNamespace(stop_run_kl=10.0))
    said = [early_end_reason(config, {"ppo/kl_to_reference": kl}) for kl in (math.nan, 11.0, 9.0)]
    assert said[0] == "ppo/kl_to_reference=nan is not finite"
    assert said[1:] == ["ppo/kl_to_reference=11 is above ppo.stop_run_kl=10", None]
