"""Copy tensors from the host to a GPU without waiting for the GPU."""

from __future__ import annotations

from torch import Tensor, device


def copy_to_device(tensor: Tensor, to: device) -> Tensor:
    """Return a CPU tensor on device ``to``; the host does not wait for a GPU.

    A GPU can copy asynchronously only from pinned memory. For other memory the host would wait
    until the GPU has finished all earlier work.
    """
    return tensor.pin_memory().to(to, non_blocking=True) if to.type == "cuda" else tensor.to(to)
