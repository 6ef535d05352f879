"""Give the examples of a new run to the phases that it runs."""

from __future__ import annotations

from dataclasses import replace

from rlhf.config.choices import SPLIT_PHASES
from rlhf.config.schema.run import RunConfig


def drop_shares_of_absent_phases(config: RunConfig) -> RunConfig:
    """Return ``config`` with a share of 0 in data.split for every phase that does not run.

    A run of one phase keeps the shares of the others: the other phases may have runs of their own,
    and with the same data and seed no prompt is in two of these runs. A run with from_run keeps the
    division of the finished run.
    """
    order = config.phase.order
    if len(order) == 1 or config.from_run is not None:
        return config
    own = {phase.data_share for phase in order}
    shares = zip(SPLIT_PHASES, config.data.split, strict=True)
    split = [share if phase in own else 0.0 for phase, share in shares]
    return replace(config, data=replace(config.data, split=split))
