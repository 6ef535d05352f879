"""ppo.value_targets=monte_carlo: true values where the steps of responses begin, for VinePPO.

The random numbers of a response's branches are keyed by step and row of the rollout of all ranks,
so they do not depend on the number of ranks. Shapes: B = sequences, T = response tokens.
"""

from __future__ import annotations

from copy import deepcopy

import torch

from rlhf.base.random_streams import random_stream
from rlhf.base.types import Rollout
from rlhf.config.schema.ppo import PpoConfig, ValueTargets
from rlhf.phases.ppo.options.branches import Brancher, BranchPoint
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.phases.ppo.targets import TargetMaker


def with_step_values(
    engine: RLHFEngine, rollout: Rollout, maker: TargetMaker, ppo: PpoConfig, *, kl_ctl: float
) -> Rollout:
    """Return ``rollout`` with the true values that ppo.value_targets=monte_carlo reads.

    Branches are scored as ``maker`` will score the rollout, under the KL coefficient ``kl_ctl``.
    """
    config, ranks = engine.config, engine.ranks
    if ppo.value_targets is ValueTargets.gae:
        return rollout
    maker = deepcopy(maker)
    maker.update_moments(rollout)
    responses, tokens = rollout.responses, config.rollout.max_response_tokens
    states: list[BranchPoint] = []
    draws = []
    for row, (ids_T, keep_T) in enumerate(zip(responses.ids_BT, responses.keep_BT, strict=True)):
        ids = ids_T[keep_T].tolist()
        starts = range(0, len(ids), ppo.value_step_tokens)
        states += [BranchPoint(row, ids[:start]) for start in starts]
        names = (str(rollout.prompts.step), ranks.rank * len(responses.ids_BT) + row)
        stream = random_stream(config.seed, "step_values", *names)
        draws.append(torch.rand(len(starts) * ppo.value_branches, tokens, generator=stream))
    # All ranks evaluate as many states, since all must take part in passes of sharded models.
    most = int(ranks.max(torch.tensor(len(states), device=ranks.device)))
    surplus = most - len(states)
    draws += [draws[0][: ppo.value_branches]] * surplus
    brancher = Brancher(engine, rollout, maker, kl_ctl)
    found = brancher.evaluate(states + states[:1] * surplus, torch.cat(draws))
    values_BT = torch.full_like(rollout.values_BT, torch.nan)
    rows = [state.row for state in states]
    columns = [len(state.prefix) for state in states]
    values_BT[rows, columns] = found.true_N[: len(states)].to(values_BT)
    return rollout._replace(step_values_BT=values_BT)
