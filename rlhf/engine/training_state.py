"""The state of a trained model: fp32 weights, AdamW's moments and a follower of the weights.

A state has the same tensors for every engine, ZeRO stage and number of ranks, so that a run can
continue on other ranks. Each tensor is flat and belongs to the trained parameter NAME:

    weights/NAME   fp32 weights, from which the model's weights are rounded
    first/NAME     first moment of AdamW
    second/NAME    second moment of AdamW
    KIND/NAME      the follower's tensor, by its ``kind``, such as the average of the weights

``BaseEngine``, the base class of the engines, evaluates a module and gathers its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf.base.ranks import Ranks
from rlhf.base.types import TensorSlice, WeightFollower
from rlhf.config.roles import SHARDED_WEIGHTS
from rlhf.engine.masters import Masters
from rlhf.kernels.torch_adamw import Split, fp32_weights

ReadPart = Callable[[str, slice], Tensor]  # returns a slice of the flat tensor with a given name
AdamMoments = Mapping[str, Tensor]  # the tensors "first" and "second" of one shard


class Piece(NamedTuple):
    """The slice of a trained parameter that this rank's optimizer holds; ``length`` may be 0."""

    name: str
    size: int  # elements of the whole parameter
    shard: int  # index of the shard in ``Masters.shards``
    offset: int  # index of the slice's first element in the shard
    start: int  # index of the slice's first element in the flat parameter
    length: int


def whole_pieces(parameters: Mapping[str, Tensor]) -> list[Piece]:
    """Return a piece for each of ``parameters``, each of which is one whole shard."""
    return [Piece(n, p.numel(), i, 0, 0, p.numel()) for i, (n, p) in enumerate(parameters.items())]


class TrainingState:
    """The tensors of one model, to save and restore; all ranks must make the same calls.

    ``moments`` are empty for a frozen model. ``copies`` are the ranks that hold the same tensors
    as this rank; each of them saves a part of the tensors.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        masters: Masters,
        moments: Sequence[AdamMoments],
        follower: WeightFollower | None,
        copies: Ranks,
    ) -> None:
        self._pieces = pieces
        self._masters = masters
        self._kinds: dict[str, Sequence[Tensor]] = {
            kind: [each[kind] for each in moments] for kind in ("first", "second") if moments
        }
        if follower is not None:
            self._kinds[follower.kind] = follower.shards
        self._copies = copies

    @property
    def total_bytes(self) -> int:
        """Return the total size of all tensors in bytes."""
        weights = 4 * sum(piece.size for piece in self._pieces)
        sizes = {kind: tensors[0].element_size() for kind, tensors in self._kinds.items()}
        return weights + weights // 4 * sum(sizes.values())

    @torch.no_grad()
    def stream(self) -> Iterator[TensorSlice]:
        """Yield this rank's part of each tensor; all ranks' parts together are the whole tensor."""
        rank, size = self._copies.rank, self._copies.size
        for name, _, shard, offset, start, length in self._pieces:
            first, last = length * rank // size, length * (rank + 1) // size
            if first == last:
                continue
            part = slice(offset + first, offset + last)
            weights = fp32_weights(self._masters.shards[shard])
            yield f"weights/{name}", start + first, weights.view(-1)[part]
            for kind, tensors in self._kinds.items():
                yield f"{kind}/{name}", start + first, tensors[shard].view(-1)[part]

    @torch.no_grad()
    def load(self, read_part: ReadPart) -> None:
        """Replace this rank's slice of each tensor by ``read_part``'s result; update the model."""
        for name, _, index, offset, start, length in self._pieces:
            if not length:
                continue
            part = slice(start, start + length)
            weights = read_part(f"weights/{name}", part)
            shard = self._masters.shards[index]
            if isinstance(shard, Split):  # a Split holds one whole parameter
                shard.split(weights)
            else:
                shard.detach().view(-1)[offset : offset + length].copy_(weights)
            for kind, tensors in self._kinds.items():
                flat = tensors[index].view(-1)
                flat[offset : offset + length].copy_(read_part(f"{kind}/{name}", part))
        self._masters.publish()


def adamw_moments(adamw: torch.optim.AdamW, shard: Tensor) -> AdamMoments:
    """Return the moments of a shard in ``adamw``; before the first step they are zeros."""
    state = adamw.state[shard]
    if not state:
        # The same initial state as torch's AdamW creates with fused=True.
        state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
        state["exp_avg"] = torch.zeros_like(shard, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(shard, memory_format=torch.preserve_format)
    return {"first": state["exp_avg"], "second": state["exp_avg_sq"]}


def adamw_step_counts(adamw: torch.optim.AdamW, shards: Sequence[Tensor]) -> list[float]:
    """Return the number of steps that ``adamw`` has taken on each shard."""
    return [float(adamw.state[shard].get("step", 0)) for shard in shards]


def set_adamw_step_counts(
    adamw: torch.optim.AdamW, shards: Sequence[Tensor], steps: Sequence[float]
) -> None:
    """Set each shard's step count; if ``steps`` has another length, set all to the largest."""
    if len(steps) != len(shards):
        steps = [max(steps, default=0.0)] * len(shards)
    for shard, number in zip(shards, steps, strict=True):
        adamw_moments(adamw, shard)
        adamw.state[shard]["step"].fill_(number)


def deepspeed_pieces(engine: Any, ranks: Ranks, *, stage: int) -> list[Piece]:
    """Return the piece of each trained parameter of a DeepSpeed engine in the masters' shards.

    ``find_deepspeed_masters`` returns these shards. DeepSpeed 0.19.8 stores the
    positions of pieces in its parameters (stages 1 and 2) or its optimizer (stage 3).
    """
    trained = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    if stage == 0:
        return whole_pieces(trained)
    if stage == SHARDED_WEIGHTS:
        return [_zero3_piece(name, p, engine.optimizer, ranks) for name, p in trained.items()]
    return [_zero1_or_2_piece(name, parameter) for name, parameter in trained.items()]


def _zero1_or_2_piece(name: str, parameter: Any) -> Piece:
    mapping, size = parameter._hp_mapping, parameter.numel()
    if mapping is None:  # the shards of this rank hold no part of the parameter
        return Piece(name, size, 0, 0, 0, 0)
    inside, in_shard = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Piece(name, size, mapping.param_group_index, in_shard.start, inside.start, inside.numel)


def _zero3_piece(name: str, parameter: Any, optimizer: Any, ranks: Ranks) -> Piece:
    shard, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
    size = parameter.ds_numel
    start = min(length * ranks.rank, size)
    return Piece(name, size, shard, offset, start, min(length, size - start))


class BaseEngine:
    """The base class of engines: a module, its precision, and tensors that follow its weights."""

    module: nn.Module
    follower: WeightFollower | None = None

    def __init__(self, *, casts_to_bf16: bool, device: torch.device) -> None:
        self._casts_to_bf16 = casts_to_bf16
        self._device = device
        self.lr_scale = 1.0

    @property
    def training_state(self) -> TrainingState:
        """Return the tensors that training changes."""
        raise NotImplementedError

    def gather_parameters(self, module: nn.Module) -> AbstractContextManager[None]:
        """Gather the parameters of ``module`` within the context, which every rank must enter."""
        return self._gather(list(module.parameters()))

    def stream_state(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield each name and whole tensor of ``state``, one at a time; clone a tensor to keep it.

        Every rank must iterate over all tensors.
        """
        for name, tensor in state.items():
            with self._gather([tensor]):
                yield name, tensor.detach()

    def _gather(self, tensors: list[Tensor]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Gather ``tensors``, which may be sharded, on every rank."""
        return nullcontext()

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the module without dropout and gradients; restore its mode on exit."""
        was_training = self.module.training
        self._set_train_mode(mode=False)
        try:
            with torch.no_grad(), self._autocast():
                yield self.module
        finally:
            self._set_train_mode(mode=was_training)

    def _set_train_mode(self, *, mode: bool) -> None:
        self.module.train(mode)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._casts_to_bf16)
