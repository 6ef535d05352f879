"""Build a model and shard its weights, or send them to the device, one at a time.

The weights of a folder are memory-mapped: every rank reads only the part that it keeps. Random
weights are drawn block by block, in the order of an ordinary build, so they have the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A function that replaces a parameter with this rank's shard (possibly the whole parameter) and
# returns the shard in the engine's precision; it returns None if the parameter is already sharded.
Shard = Callable[[nn.Parameter], Tensor | None]


@contextmanager
def draw_weights_by_block(shard: Shard | None = None) -> Iterator[None]:
    """Make transformers draw random weights in fp32 for models that are built in this context.

    With ``shard`` the whole model is never in memory. The memory of each module is freed as soon as
    the module is constructed. It is allocated again block by block (element of a ModuleList), to
    initialize and shard the block. The values equal those of an ordinary build, since random
    numbers are drawn in the same order.
    """
    from transformers import PreTrainedModel

    drawn: set[nn.Parameter] = set()
    within_blocks: set[nn.Module] = set()
    initialize = PreTrainedModel._initialize_weights

    def give_back(parent: nn.Module, _: str, module: nn.Module | None) -> None:
        for each in () if module is None else module.modules():
            for name, parameter in each.named_parameters(recurse=False):
                if parameter not in drawn:
                    each._parameters[name] = nn.Parameter(parameter.to("meta"))
            if isinstance(parent, nn.ModuleList) and each is not module:
                within_blocks.add(each)

    def draw(model: PreTrainedModel, module: nn.Module, *args: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in drawn and not _is_loaded(parameter):
                empty = torch.empty(parameter.shape, dtype=torch.float32)
                module._parameters[name] = nn.Parameter(empty)
                drawn.add(module._parameters[name])  # type: ignore[arg-type]
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and not _is_loaded(buffer):
                module._buffers[name] = buffer.float()
        initialize(model, module, *args)
        if shard is not None and module not in within_blocks:
            for parameter in module.parameters():
                shard(parameter)

    PreTrainedModel._initialize_weights = draw
    register = nn.modules.module.register_module_module_registration_hook
    handle = None if shard is None else register(give_back)
    try:
        yield
    finally:
        PreTrainedModel._initialize_weights = initialize
        if handle is not None:
            handle.remove()


def _is_loaded(tensor: Tensor) -> bool:
    """Return True if transformers marked ``tensor`` as loaded, or as tied to a loaded tensor."""
    return getattr(tensor, "_is_hf_initialized", False)


def shard_parameters(
    model: PreTrainedModel, shard: Shard, check: Callable[[str, Tensor], None] | None = None
) -> None:
    """Shard all parameters that are not sharded yet, one at a time.

    ``check`` is called with the name of each parameter and with this rank's shard.
    """
    for name, parameter in model.named_parameters():
        part = shard(parameter)
        if check is not None and part is not None:
            check(name, part)
