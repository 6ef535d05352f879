"""Copies from the host to a GPU for which the host does not wait."""

from __future__ import annotations

from torch import Tensor, device


def copy_to_device(tensor: Tensor, to: device) -> Tensor:
    """Return a tensor of the host on device ``to``.

    A GPU copies from pinned memory, in its own time. For memory that is not pinned the host would
    wait until the GPU has done all that was asked of it before.
    """
    return tensor.pin_memory().to(to, non_blocking=True) if to.type == "cuda" else tensor.to(to)
