"""Copies of a model's upper blocks, which start from hidden states of the whole model.

Shapes: B = sequences, S = tokens, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from rlhf.base.errors import CapabilityError
from rlhf.models.families import FAMILIES, family_of, find_submodule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BlockCall(NamedTuple):
    """The recorded arguments of a block's call: the hidden state, and the others such as masks."""

    hidden_BSH: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Branch(nn.Module):
    """A copy of a model's upper blocks and of the modules that follow them."""

    def __init__(self, blocks: Sequence[nn.Module], tail: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(deepcopy(block) for block in blocks)
        self.tail = nn.ModuleList(deepcopy(module) for module in tail)

    def forward(self, calls: Sequence[BlockCall]) -> Tensor:
        """Run the branch, and return its last hidden state (B, S, H).

        ``calls`` are the recorded calls of the original blocks. The branch starts from the hidden
        state of the first call; of the other calls it uses only masks and positions.
        """
        hidden_BSH = calls[0].hidden_BSH
        for block, call in zip(self.blocks, calls, strict=True):
            output = block(hidden_BSH, *call.args, **call.kwargs)
            hidden_BSH = output[0] if isinstance(output, tuple) else output
        for module in self.tail:
            hidden_BSH = module(hidden_BSH)
        return hidden_BSH


def find_block_and_tail_paths(
    model: PreTrainedModel, *, needed_by: str, off: str
) -> tuple[str, list[str]]:
    """Return the attribute path of the list of blocks, and the paths of the modules after it.

    ``needed_by`` is the config key that requires these paths unless its value is ``off``.

    Raises:
        CapabilityError: if families.yaml has no ``blocks`` for the model_type of ``model``.
    """
    family = family_of(model)
    if family.blocks is None:
        known = (name for name, each in FAMILIES.items() if each.blocks is not None)
        raise CapabilityError(
            f"{needed_by} is not supported for model_type={model.config.model_type}, only for "
            f"{', '.join(known)}; set {needed_by}={off}"
        )
    tail = [name for name in family.tail if find_submodule(model.base_model, name) is not None]
    return family.blocks, tail


@contextmanager
def record_calls(blocks: Sequence[nn.Module]) -> Iterator[list[BlockCall]]:
    """Yield a list that records the calls of ``blocks`` within the context, in order."""
    calls: list[BlockCall] = []

    def record_call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(BlockCall(args[0], args[1:], kwargs))

    handles = [block.register_forward_pre_hook(record_call, with_kwargs=True) for block in blocks]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
