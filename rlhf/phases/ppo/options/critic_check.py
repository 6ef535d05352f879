"""ppo.critic_check: the critic's values beside true values, in some states of some steps.

The two states of a pair follow alternative steps from one earlier state of a rollout's response:
the response's own step, and a step that is sampled. Random numbers come from a stream of their own,
and training reads nothing of a check. Shapes: N = pairs of this rank, B = branches of this rank.
"""

from __future__ import annotations

import math
import time
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from rlhf.algorithms.branching import choose_steps
from rlhf.base.critic_states import CriticState, measure_critic
from rlhf.base.random_streams import random_stream
from rlhf.base.types import Rollout
from rlhf.phases.ppo.options.branches import Brancher, BranchPoint
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.phases.ppo.targets import TargetMaker
from rlhf.phases.shared.context import RunContext


class _Pair(NamedTuple):
    """Two states after alternative steps."""

    own: BranchPoint
    other: BranchPoint
    place: float  # tokens before the own state, as a share of its response
    differs: bool  # False: the other step ended the response, or is the same step


class CriticCheck:
    """A check of the critic at every ``ppo.critic_check.every``-th step."""

    def __init__(self, context: RunContext, engine: RLHFEngine) -> None:
        self._context = context
        self._engine = engine
        self._config = context.config.ppo.critic_check
        self._num_pairs = self._config.states // 2  # over all ranks

    def measure(
        self, rollout: Rollout, maker: TargetMaker, *, step: int, kl_ctl: float
    ) -> dict[str, float]:
        """Return the metrics of a check, before the step's updates; {} at steps without a check.

        Branches are scored as ``maker`` will score the rollout, under the KL coefficient
        ``kl_ctl``. The states of all ranks are recorded.
        """
        config, context = self._config, self._context
        if not config.every or step % config.every:
            return {}
        started = time.monotonic()
        maker = deepcopy(maker)
        maker.update_moments(rollout)
        brancher = Brancher(self._engine, rollout, maker, kl_ctl)
        stream = random_stream(context.config.seed, "critic_check", step)
        pairs = self._choose_pairs(brancher, stream)
        draws_BT = self._draw(stream, config.states * config.branches)
        states = [state for pair in pairs for state in (pair.own, pair.other)]
        found = brancher.evaluate(states, draws_BT)
        values = list(zip(*(each.tolist() for each in found), strict=True))
        first = step * self._num_pairs + context.ranks.rank * len(pairs)
        here = [
            CriticState(first + number, pair.place, *each)
            for number, pair in enumerate(pairs)
            for each in values[2 * number :][: 1 + pair.differs]
            if all(map(math.isfinite, each))
        ]
        everywhere = [state for of_rank in context.ranks.gather(here) for state in of_rank]
        context.tracker.critic_states("ppo", step, everywhere)
        metrics = {f"ppo/critic_{name}": x for name, x in measure_critic(everywhere).items()}
        return metrics | {"time/critic_check_seconds": time.monotonic() - started}

    def _choose_pairs(self, brancher: Brancher, stream: Generator) -> list[_Pair]:
        """Choose responses at equal distances, and a step of each; sample the other steps."""
        responses = brancher.rollout.responses
        masked = zip(responses.ids_BT, responses.keep_BT, strict=True)
        whole = [ids_T[keep_T].tolist() for ids_T, keep_T in masked]
        mine = self._context.ranks.share(range(self._num_pairs))
        rows = [number * len(whole) // len(mine) for number in range(len(mine))]
        lengths_N = torch.tensor([len(whole[row]) for row in rows])
        draws_N = torch.rand(self._num_pairs, generator=stream)[mine]
        steps = choose_steps(draws_N, lengths_N, step_tokens=self._config.step_tokens)
        starts, ends = (places_N.tolist() for places_N in steps)
        sampled = brancher.continue_responses(
            [BranchPoint(row, whole[row][:start]) for row, start in zip(rows, starts, strict=True)],
            self._draw(stream, self._num_pairs),
            limits=[max(end, 1) for end in ends],
        )
        pairs = []
        for number, (row, end) in enumerate(zip(rows, ends, strict=True)):
            own = BranchPoint(row, whole[row][:end])
            ids = sampled.ids_BT[number][sampled.keep_BT[number]].tolist()
            other, has_ended = BranchPoint(row, ids[:end]), bool(sampled.ended_B[number])
            differs = not has_ended and other != own
            pairs.append(_Pair(own, other, end / len(whole[row]), differs))
        return pairs

    def _draw(self, stream: Generator, rows: int) -> Tensor:
        """Return this rank's share of uniform numbers for ``rows`` responses of all ranks."""
        tokens = self._context.config.rollout.max_response_tokens
        draws_BT = torch.rand(rows, tokens, generator=stream)
        return draws_BT[self._context.ranks.share(range(rows))]
