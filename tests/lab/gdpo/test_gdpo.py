"""GDPO: each reward is normalised in its group, then their sum over the rollout.

bad_commands.txt has what is refused.
"""

from __future__ import annotations

import statistics

import pytest
import torch

from rlhf.base.ranks import Ranks
from rlhf.base.types import Responses, Rollout, TermScores
from rlhf.config.typed import to_run_config
from rlhf.phases.ppo.hooks import build_hooks
from rlhf.phases.ppo.targets import TargetMaker, Targets
from tests.conftest import Compose
from tests.phases.ppo.ppo_pieces import OneOfTwo
from tests.phases.ppo.test_targets import BARE, rollout_of

GROUP, GROUPS, TOKENS = 4, 3, 5
WEIGHTS = (1.0, 0.3, 0.0)
KEYS = ["ppo.gdpo=true", "ppo.advantage_estimator=dr_grpo", f"ppo.responses_per_prompt={GROUP}"]
REWARDS = "+rewards={{a: {{kind: model, weight: {}}}, b: {{kind: stop, weight: {}}}, "
REWARDS += "c: {{kind: stop, weight: {}}}}}"
REWARDS = REWARDS.format(*WEIGHTS)


def some_rollout(seed: int) -> Rollout:
    """Random scores of three rewards, which differ 1000 times in scale, and random lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows = GROUP * GROUPS
    scores_BK = torch.randn(rows, 3, generator=generator) * torch.tensor([1000.0, 1.0, 1.0])
    scores_BK[:GROUP, 1] = 0.1  # a reward that tells nothing about the first prompt
    lengths_B = torch.randint(1, TOKENS + 1, (rows,), generator=generator)
    keep_BT = torch.arange(TOKENS) < lengths_B[:, None]
    zeros_BT = torch.zeros(rows, TOKENS)
    responses = Responses(zeros_BT.long(), keep_BT, keep_BT[:, 0])
    sums_B = scores_BK @ torch.tensor(WEIGHTS)
    plain = rollout_of(*sums_B.tolist())
    failed_BK = torch.zeros(rows, 3, dtype=torch.bool)
    return Rollout(plain.prompts, responses, zeros_BT, zeros_BT, zeros_BT, sums_B)._replace(
        parts=TermScores(scores_BK, failed_BK)
    )


def slow_advantages(scores: list[list[float]]) -> list[float]:
    """Advantages of the responses, whose ``scores`` are lists of one number per reward."""
    sums = []
    for row, own in enumerate(scores):
        group = scores[row // GROUP * GROUP :][:GROUP]
        total = 0.0
        for reward, weight in enumerate(WEIGHTS):
            column = [each[reward] for each in group]
            spread = statistics.stdev(column) + 1e-6
            total += weight * (own[reward] - statistics.fmean(column)) / spread
        sums.append(total)
    mean, deviation = statistics.fmean(sums), statistics.pstdev(sums)
    return [(each - mean) / deviation for each in sums]


def made(compose: Compose, rollout: Rollout, ranks: Ranks) -> Targets:
    config = to_run_config(compose([*BARE, *KEYS, REWARDS]))
    maker = TargetMaker(config.ppo, ranks, config.rewards, build_hooks(config))
    maker.update_moments(rollout)
    return maker.make(rollout, kl_ctl=0.0)


@pytest.mark.parametrize("ranks", [Ranks(), OneOfTwo(size=2)])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_against_a_slow_loop(compose: Compose, seed: int, ranks: Ranks) -> None:
    rollout = some_rollout(seed)
    assert rollout.parts is not None
    expected_B = torch.tensor(slow_advantages(rollout.parts.scores_BK.double().tolist()))
    expected_BT = expected_B[:, None] * rollout.responses.keep_BT
    found = made(compose, rollout, ranks)
    torch.testing.assert_close(found.advantages.advantages_BT, expected_BT, atol=1e-5, rtol=1e-5)


def test_equal_rewards_give_no_advantage(compose: Compose) -> None:
    rollout = some_rollout(0)
    assert rollout.parts is not None
    scores_BK = torch.full_like(rollout.parts.scores_BK, 0.1)
    rollout = rollout._replace(parts=rollout.parts._replace(scores_BK=scores_BK))
    assert not made(compose, rollout, Ranks()).advantages.advantages_BT.any()
