"""Wrong labels on purpose: how reward models and DPO learn from people who err."""

from __future__ import annotations

import random

from rlhf.data.splits import PhaseData


def exchange_answers(part: PhaseData, *, share: float, seed: int) -> PhaseData:
    """Return ``part`` with chosen and rejected exchanged in a random ``share`` of training pairs.

    The pairs follow from ``seed``. Held-out pairs keep their labels.
    Source: https://arxiv.org/abs/2310.02743, with a share of 0.25.
    """
    pairs = [place for place, record in enumerate(part.train) if record.rejected is not None]
    train = list(part.train)
    for place in random.Random(f"label-noise-{seed}").sample(pairs, round(share * len(pairs))):
        record = train[place]
        train[place] = record._replace(chosen=record.rejected, rejected=record.chosen)
    return part._replace(train=train)
