"""Sample branches: continuations of responses from states in their middle, with PPO's rewards.

The mean return of a state's branches estimates its true value. Two keys need true values:
ppo.value_targets=monte_carlo (VinePPO) uses them in states where steps of responses begin, and
ppo.critic_check compares the critic's values with them in some states of some PPO steps.

Shapes: N = states or pairs of states, K = branches per state, B = sequences, T = response tokens.
"""

from __future__ import annotations

import math
import time
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from rlhf.base.random_streams import random_stream
from rlhf.base.types import Responses, Rollout, copy_to_device, take_rows
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.phases.ppo.targets import TargetMaker
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.scoring import score_responses, split_rows
from rlhf.rollout.fast import FastRollout
from rlhf_lab.branches import Branches, BranchKeys
from rlhf_lab.branches.critic_states import CriticState, measure_critic
from rlhf_lab.branches.values import average_returns, choose_steps, rewards_to_go

STEP_VALUES = "step_values_BT"  # key in Rollout.extras; NaN except at tokens that begin a step


class BranchPoint(NamedTuple):
    """A state to continue from: a row of a rollout, and the first tokens of the row's response."""

    row: int
    prefix: list[int]


class StateValues(NamedTuple):
    """The critic's values of N states, estimates of true values, and their standard errors."""

    critic_N: Tensor
    true_N: Tensor
    errors_N: Tensor


class Brancher(NamedTuple):
    """A sampler of branches from states of ``rollout``; ``maker`` computes their rewards."""

    engine: RLHFEngine
    rollout: Rollout
    maker: TargetMaker
    kl_ctl: float

    @classmethod
    def build(
        cls, engine: RLHFEngine, rollout: Rollout, maker: TargetMaker, *, kl_ctl: float
    ) -> Brancher:
        """Return a sampler that scores branches as ``maker`` will score the rollout."""
        maker = deepcopy(maker)
        maker.update_moments(rollout)
        return cls(engine, rollout, maker, kl_ctl)

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

    def estimate_values(self, states: list[BranchPoint], draws_BT: Tensor) -> StateValues:
        """Return values of ``states``; true values come from ``len(draws_BT)`` branches in all.

        Each state gets the same number of branches. No batch has more rows than the rollout.
        """
        branches = len(draws_BT) // len(states)
        repeated = [state for state in states for _ in range(branches)]
        size = max(1, len(self.rollout.scores_B) // branches) * branches
        sampled = [
            self._sample_returns_and_values([repeated[row] for row in rows], draws_BT[rows])
            for rows in split_rows(list(range(len(repeated))), size)
        ]
        returns_B, values_B = (torch.cat(tensors) for tensors in zip(*sampled, strict=True))
        return StateValues(values_B[::branches], *average_returns(returns_B, branches=branches))

    def _sample_returns_and_values(
        self, states: list[BranchPoint], draws_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Continue each state once; return the sampled returns (B,) and the critic's values (B,).

        The log-probabilities of prefixes are not measured. Only rewards of the prefixes depend on
        them, and the returns do not include these rewards.
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
        starts = torch.tensor([len(state.prefix) for state in states])
        starts_B = copy_to_device(starts, sampled.values_BT.device)
        gamma = self.engine.config.ppo.gamma
        returns_B = rewards_to_go(targets.rewards_BT, responses.keep_BT, starts_B, gamma=gamma)
        return returns_B, sampled.values_BT.gather(1, starts_B[:, None]).squeeze(1)


def add_step_values(
    engine: RLHFEngine, rollout: Rollout, maker: TargetMaker, *, kl_ctl: float
) -> Rollout:
    """Return ``rollout`` with estimates of the true values of the states where steps begin.

    The random numbers of a response's branches are keyed by the step, and by the response's row
    among all ranks, so they do not depend on the number of ranks.
    """
    config, ranks = engine.config, engine.ranks
    keys = BranchKeys.of(maker.config)
    responses, tokens = rollout.responses, config.rollout.max_response_tokens
    states: list[BranchPoint] = []
    draws = []
    for row, (ids_T, keep_T) in enumerate(zip(responses.ids_BT, responses.keep_BT, strict=True)):
        ids = ids_T[keep_T].tolist()
        starts = range(0, len(ids), keys.value_step_tokens)
        states += [BranchPoint(row, ids[:start]) for start in starts]
        names = (str(rollout.prompts.step), ranks.rank * len(responses.ids_BT) + row)
        stream = random_stream(config.seed, "step_values", *names)
        draws.append(torch.rand(len(starts) * keys.value_branches, tokens, generator=stream))
    # All ranks evaluate equally many states, since all must take part in passes of sharded models.
    most = int(ranks.max(torch.tensor(len(states), device=ranks.device)))
    surplus = most - len(states)
    draws += [draws[0][: keys.value_branches]] * surplus
    brancher = Brancher.build(engine, rollout, maker, kl_ctl=kl_ctl)
    values = brancher.estimate_values(states + states[:1] * surplus, torch.cat(draws))
    values_BT = torch.full_like(rollout.values_BT, torch.nan)
    rows = [state.row for state in states]
    columns = [len(state.prefix) for state in states]
    values_BT[rows, columns] = values.true_N[: len(states)].to(values_BT)
    return rollout._replace(extras={**rollout.extras, STEP_VALUES: values_BT})


class _Pair(NamedTuple):
    """Two states after alternative steps from one earlier state of a response.

    One step is the response's own step; the other is sampled by the check.
    """

    own: BranchPoint
    other: BranchPoint
    place: float  # place of ``own`` in its response, from 0 to 1
    differs: bool  # False if the sampled step ended the response, or equals the response's


class CriticCheck:
    """Checks of the critic, one in every ``ppo.critic_check.every`` steps."""

    def __init__(self, context: RunContext, engine: RLHFEngine) -> None:
        self._context = context
        self._engine = engine
        self._config = BranchKeys.of(context.config).critic_check
        self._num_pairs = self._config.states // 2  # over all ranks

    def measure_if_due(
        self, rollout: Rollout, maker: TargetMaker, *, step: int, kl_ctl: float
    ) -> dict[str, float]:
        """Check the critic before the updates of a step; return metrics, {} if no check is due.

        The states of all ranks are logged. Training does not depend on a check.
        """
        config, context = self._config, self._context
        if not config.every or step % config.every:
            return {}
        started = time.monotonic()
        brancher = Brancher.build(self._engine, rollout, maker, kl_ctl=kl_ctl)
        stream = random_stream(context.config.seed, "critic_check", step)
        pairs = self._choose_pairs(brancher, stream)
        draws_BT = self._draw_uniform(stream, config.states * config.branches)
        states = [state for pair in pairs for state in (pair.own, pair.other)]
        tensors = brancher.estimate_values(states, draws_BT)
        values = list(zip(*(values_N.tolist() for values_N in tensors), strict=True))
        first_number = step * self._num_pairs + context.ranks.rank * len(pairs)
        of_rank = [
            CriticState(first_number + index, pair.place, *numbers)
            for index, pair in enumerate(pairs)
            for numbers in values[2 * index :][: 1 + pair.differs]
            if all(map(math.isfinite, numbers))
        ]
        checked = [state for states in context.ranks.all_gather(of_rank) for state in states]
        context.tracker.append(Branches.log, "ppo", step, [state._asdict() for state in checked])
        metrics = {f"ppo/critic_{name}": x for name, x in measure_critic(checked).items()}
        return metrics | {"time/critic_check_seconds": time.monotonic() - started}

    def _choose_pairs(self, brancher: Brancher, stream: Generator) -> list[_Pair]:
        """Choose evenly spaced responses, and one step of each; sample an alternative step."""
        responses = brancher.rollout.responses
        masked = zip(responses.ids_BT, responses.keep_BT, strict=True)
        whole = [ids_T[keep_T].tolist() for ids_T, keep_T in masked]
        own_pairs = self._context.ranks.own_rows(range(self._num_pairs))
        rows = [index * len(whole) // len(own_pairs) for index in range(len(own_pairs))]
        lengths_N = torch.tensor([len(whole[row]) for row in rows])
        draws_N = torch.rand(self._num_pairs, generator=stream)[own_pairs]
        steps = choose_steps(draws_N, lengths_N, step_tokens=self._config.step_tokens)
        starts, ends = (tokens_N.tolist() for tokens_N in steps)
        sampled = brancher.continue_responses(
            [BranchPoint(row, whole[row][:start]) for row, start in zip(rows, starts, strict=True)],
            self._draw_uniform(stream, self._num_pairs),
            limits=[max(end, 1) for end in ends],
        )
        pairs = []
        for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
            own = BranchPoint(row, whole[row][:end])
            ids = sampled.ids_BT[index][sampled.keep_BT[index]].tolist()
            other, has_ended = BranchPoint(row, ids[:end]), bool(sampled.ended_B[index])
            differs = not has_ended and other != own
            pairs.append(_Pair(own, other, end / len(whole[row]), differs))
        return pairs

    def _draw_uniform(self, stream: Generator, rows: int) -> Tensor:
        """Draw uniform numbers for ``rows`` responses of all ranks; return this rank's share."""
        tokens = self._context.config.rollout.max_response_tokens
        draws_BT = torch.rand(rows, tokens, generator=stream)
        return draws_BT[self._context.ranks.own_rows(range(rows))]
