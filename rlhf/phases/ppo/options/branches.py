"""Branches: continuations of responses from states in their middle, scored as PPO scores.

Shapes: N = states, K = branches per state, B = N * K sequences, T = response tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.branching import branch_values, rewards_to_go
from rlhf.base.host_copies import copy_to_device
from rlhf.base.types import Responses, Rollout, take_rows
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.phases.ppo.targets import TargetMaker
from rlhf.phases.shared.scoring import score_responses, split_rows
from rlhf.rollout.fast import FastRollout


class BranchPoint(NamedTuple):
    """A state to continue from: a row of a rollout, and the tokens of its response before it."""

    row: int
    prefix: list[int]


class StateValues(NamedTuple):
    """The critic's values, estimates of true values, and standard errors of the estimates."""

    critic_N: Tensor
    true_N: Tensor
    errors_N: Tensor


class Brancher(NamedTuple):
    """A sampler of branches from states of ``rollout``, whose rewards ``maker`` makes."""

    engine: RLHFEngine
    rollout: Rollout
    maker: TargetMaker
    kl_ctl: float

    def continue_responses(
        self, states: list[BranchPoint], draws_NT: Tensor, *, limits: list[int] | None = None
    ) -> Responses:
        """Continue ``states`` with the current policy; return whole responses, prefixes included.

        Response i has at most limits[i] tokens (None: rollout.max_response_tokens).
        """
        backend = self.engine.rollout
        assert isinstance(backend, FastRollout), "only the fast backend continues responses"
        prompts = take_rows(self.rollout.prompts, [state.row for state in states])
        prompts = prompts._replace(draws_BT=copy_to_device(draws_NT, prompts.ids_BP.device))
        prefixes = [state.prefix for state in states]
        return backend.generate(self.engine.actor, prompts, limits=limits, prefixes=prefixes)

    def evaluate(self, states: list[BranchPoint], draws_BT: Tensor) -> StateValues:
        """Return values of ``states`` from branches, one for each row of ``draws_BT``.

        No batch of branches is larger than the rollout.
        """
        branches = len(draws_BT) // len(states)
        repeated = [state for state in states for _ in range(branches)]
        size = max(1, len(self.rollout.scores_B) // branches) * branches
        found = [
            self._returns_and_values([repeated[row] for row in rows], draws_BT[rows])
            for rows in split_rows(list(range(len(repeated))), size)
        ]
        returns_B, values_B = (torch.cat(each) for each in zip(*found, strict=True))
        return StateValues(values_B[::branches], *branch_values(returns_B, branches=branches))

    def _returns_and_values(
        self, states: list[BranchPoint], draws_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Continue each state once; return the rewards that follow it (B,), and its value (B,).

        The log-probabilities of prefixes, which sampling does not measure, enter only the rewards
        of prefixes.
        """
        responses = self.continue_responses(states, draws_BT)
        sampled = score_responses(
            self.engine.models,
            take_rows(self.rollout.prompts, [state.row for state in states]),
            responses,
            micro_batch_size=self.engine.plan.micro,
            with_policy=not self.rollout.reuses_logprobs,
        )
        targets = self.maker.held_out_targets(sampled, kl_ctl=self.kl_ctl)
        assert targets is not None, "only GAE has a critic"
        places = torch.tensor([len(state.prefix) for state in states])
        places_B = copy_to_device(places, sampled.values_BT.device)
        gamma = self.engine.config.ppo.gamma
        returns_B = rewards_to_go(targets.rewards_BT, responses.keep_BT, places_B, gamma=gamma)
        return returns_B, sampled.values_BT.gather(1, places_B[:, None]).squeeze(1)
