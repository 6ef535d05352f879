"""Write digests of the weights after a step to digests.jsonl."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf.base.ranks import Ranks
from rlhf.base.types import StatefulWithTensors
from rlhf.config.choices import Phase
from rlhf.engine.masters import CHUNK
from rlhf.engine.training_state import BaseEngine
from rlhf.options.replay.keys import LOG
from rlhf.phases.shared.context import RunContext


def observe_step(
    context: RunContext,
    phase: Phase,
    step: int,
    engines: Mapping[str, StatefulWithTensors],
    *,
    is_last: bool,
) -> None:
    """Log digests of the weights every ``checkpoint.digest_every`` steps, and after the last."""
    if is_last or step % context.config.checkpoint.digest_every == 0:
        context.tracker.append(LOG, phase, step, [{"weights": sum_digests(engines, context.ranks)}])


def sum_digests(engines: Mapping[str, StatefulWithTensors], ranks: Ranks) -> dict[str, str]:
    """Return the digest of each parameter under ENGINE/PARAMETER; every rank must call this."""
    digests_here = {
        f"{engine}/{name.partition('/')[2]}": int(digest_of_slice(slice_N, start))
        for engine, model in engines.items()
        if isinstance(model, BaseEngine)  # skip pending responses: this rank would have to wait
        for name, start, slice_N in model.training_state.stream()
        if name.startswith("weights/")
    }
    total = Counter[str]()
    for share in ranks.all_gather(digests_here):
        total.update(share)
    return {name: f"{digest % 2**64:016x}" for name, digest in total.items()}


def digest_of_slice(slice_N: Tensor, start: int) -> Tensor:
    """Return the contribution of a slice of a flat fp32 tensor to the digest of the tensor.

    ``start`` is the index of the slice's first element. The digest is the sum of bits_i * (2 i + 1)
    modulo 2^64 over the elements i. Parts can be added in any order, and a change of one element
    changes the digest. It detects faults, not forgeries.
    """
    total = torch.zeros((), dtype=torch.int64, device=slice_N.device)
    for chunk_N in torch.split(slice_N, CHUNK):
        end = start + len(chunk_N)
        odd_N = torch.arange(2 * start + 1, 2 * end + 1, 2, device=chunk_N.device)
        total += odd_N.mul_(chunk_N.view(torch.int32)).sum()
        start = end
    return total
