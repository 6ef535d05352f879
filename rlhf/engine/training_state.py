"""The state of a trained model: fp32 weights, AdamW's moments and a follower of the weights.

A state has the same tensors for every engine, ZeRO stage and number of ranks, so that a run can
continue on other ranks. Each tensor is flat and named KIND/PARAMETER:

    weights/NAME   fp32 weights, from which the model's weights are rounded
    first/NAME     first moment of AdamW
    second/NAME    second moment of AdamW
    KIND/NAME      the follower's tensor, such as the average of the weights

``BaseEngine``, the base class of the engines, evaluates a module and gathers its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf.base.ranks import Ranks
from rlhf.base.types import WeightFollower
from rlhf.config.roles import SHARDED_WEIGHTS
from rlhf.engine.masters import Masters, Split, find_deepspeed_masters, fp32_weights

ReadPart = Callable[[str, slice], Tensor]  # returns a slice of the flat tensor with a given name
SliceFunction = Callable[[Tensor, int], Tensor]  # (flat fp32 slice, its start) -> integer
AdamMoments = Mapping[str, Tensor]  # the tensors "first" and "second" of one shard


class Piece(NamedTuple):
    """The slice of a parameter that this rank's optimizer holds; ``length`` may be 0."""

    shard: int  # index of the shard in ``Masters.shards``
    offset: int  # index of the slice's first element in the shard
    start: int  # index of the slice's first element in the flat parameter
    length: int


class ParameterPlace(NamedTuple):
    """A trained parameter, and the place of its state in this rank's shards."""

    name: str
    size: int  # elements of the whole parameter
    piece: Piece


class TrainingState:
    """The tensors of one trained model, to save and restore; all ranks must make the same calls."""

    def __init__(
        self,
        places: Sequence[ParameterPlace],
        masters: Masters,
        moments: Sequence[AdamMoments],
        follower: WeightFollower | None,
        ranks: Ranks,
    ) -> None:
        self._places = places
        self._masters = masters
        self._kinds: dict[str, Sequence[Tensor]] = {
            kind: [each[kind] for each in moments] for kind in ("first", "second")
        }
        if follower is not None:
            self._kinds[follower.kind] = follower.shards
        self._ranks = ranks

    @property
    def total_bytes(self) -> int:
        """Return the total size of all tensors in bytes."""
        weights = 4 * sum(place.size for place in self._places)
        sizes = {kind: tensors[0].element_size() for kind, tensors in self._kinds.items()}
        return weights + weights // 4 * sum(sizes.values())

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor whole and flat, one at a time, with its name."""
        for place in self._places:
            shard = self._masters.shards[place.piece.shard]
            yield f"weights/{place.name}", self._gather_whole(place, fp32_weights(shard))
            for kind, tensors in self._kinds.items():
                yield f"{kind}/{place.name}", self._gather_whole(place, tensors[place.piece.shard])

    @torch.no_grad()
    def load(self, read_part: ReadPart) -> None:
        """Replace this rank's slice of each tensor by ``read_part``'s result; update the model."""
        for place in self._places:
            _, offset, start, length = place.piece
            part = slice(start, start + length)
            weights = read_part(f"weights/{place.name}", part)
            shard = self._masters.shards[place.piece.shard]
            if isinstance(shard, Split):  # a Split holds one whole parameter
                shard.split(weights)
            else:
                shard.detach().view(-1)[offset : offset + length].copy_(weights)
            for kind, tensors in self._kinds.items():
                flat = tensors[place.piece.shard].view(-1)
                flat[offset : offset + length].copy_(read_part(f"{kind}/{place.name}", part))
        self._masters.publish()

    @torch.no_grad()
    def sum_per_weight(self, function: SliceFunction) -> dict[str, int]:
        """Return per parameter the sum of ``function(slice, start)`` over all ranks, mod 2^64."""
        own = []
        for place in self._places:
            _, offset, start, length = place.piece
            flat = fp32_weights(self._masters.shards[place.piece.shard]).reshape(-1)
            own.append(function(flat[offset : offset + length], start))
        found = self._ranks.sum(torch.stack(own)).tolist()
        return {place.name: each % 2**64 for place, each in zip(self._places, found, strict=True)}

    def _gather_whole(self, place: ParameterPlace, shard: Tensor) -> Tensor:
        """Return the whole flat tensor of a parameter; ranks sum their slices' bits as integers."""
        _, offset, start, length = place.piece
        own = shard.detach().reshape(-1)[offset : offset + length]
        if self._ranks.size == 1:
            return own
        whole = torch.zeros(place.size, dtype=own.dtype, device=self._ranks.device)
        whole[start : start + length].copy_(own)
        return self._ranks.sum(whole.view(torch.int32)).view(own.dtype)


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


class DeepSpeedState:
    """The part of a DeepSpeed engine's state that training changes: tensors and counters."""

    def __init__(self, engine: Any, ranks: Ranks, *, stage: int) -> None:
        self._engine = engine
        self._stage = stage
        self._ranks = ranks

    def build_training_state(self, follower: WeightFollower | None) -> TrainingState:
        """Return the training state, including the tensors of ``follower``."""
        places = _parameter_places(self._engine, self._ranks, stage=self._stage)
        masters, shards = self._masters(), self._shards()
        moments = [adamw_moments(self._adamw, shard) for shard in shards]
        ranks = self._ranks if self._stage else Ranks()  # at stage 0 every rank has whole tensors
        return TrainingState(places, masters, moments, follower, ranks)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters of schedule and optimizer, and the loss scaler."""
        # Only an optimizer of stage 1 or higher scales losses.
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        scaled = {} if scaler is None else vars(scaler)
        return {
            "steps": self._engine.lr_scheduler.last_epoch,
            "adamw_steps": adamw_step_counts(self._adamw, self._shards()),
            "loss_scaler": {k: v for k, v in scaled.items() if isinstance(v, int | float)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state`` that ``state_dict`` returned."""
        scheduler = self._engine.lr_scheduler
        scheduler.last_epoch = state["steps"]
        scheduler._step_count = state["steps"] + 1
        scheduler._last_lr = scheduler.get_lr()
        set_adamw_step_counts(self._adamw, self._shards(), state["adamw_steps"])
        if scaled := state.get("loss_scaler"):
            vars(self._engine.optimizer.loss_scaler).update(scaled)

    @property
    def _adamw(self) -> torch.optim.AdamW:
        """Return torch's optimizer, which DeepSpeed wraps from stage 1 on."""
        optimizer = self._engine.optimizer
        found = optimizer if self._stage == 0 else optimizer.optimizer
        assert isinstance(found, torch.optim.AdamW)
        return found

    def _masters(self) -> Masters:
        return find_deepspeed_masters(self._engine, stage=self._stage)

    def _shards(self) -> list[Tensor]:
        """Return the shards of the masters, which are AdamW's parameters."""
        return [shard for shard in self._masters().shards if isinstance(shard, Tensor)]


def _parameter_places(engine: Any, ranks: Ranks, *, stage: int) -> list[ParameterPlace]:
    """Return each trained parameter of a DeepSpeed engine with its place in the masters' shards.

    ``find_deepspeed_masters`` returns these shards. DeepSpeed 0.19.8 keeps the places in attributes
    of parameters (stages 1 and 2) or of its optimizer (stage 3).
    """
    trained = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
    if stage == 0:
        sizes = [(name, parameter.numel()) for name, parameter in trained]
        return [ParameterPlace(n, size, Piece(i, 0, 0, size)) for i, (n, size) in enumerate(sizes)]
    if stage == SHARDED_WEIGHTS:
        return [ParameterPlace(n, p.ds_numel, _zero3_slice(engine, p, ranks)) for n, p in trained]
    return [ParameterPlace(name, p.numel(), _zero1_or_2_slice(p)) for name, p in trained]


def _zero1_or_2_slice(parameter: Any) -> Piece:
    mapping = parameter._hp_mapping
    if mapping is None:  # the shards of this rank hold no part of the parameter
        return Piece(0, 0, 0, 0)
    inside, in_shard = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Piece(mapping.param_group_index, in_shard.start, inside.start, inside.numel)


def _zero3_slice(engine: Any, parameter: Any, ranks: Ranks) -> Piece:
    optimizer = engine.optimizer
    shard, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = min(length * ranks.rank, parameter.ds_numel)
    return Piece(shard, offset, start, min(length, parameter.ds_numel - start))


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

    def sum_per_weight(self, function: SliceFunction) -> dict[str, int]:
        """Return per parameter the sum of ``function(slice, start)`` over all ranks, mod 2^64."""
        return self.training_state.sum_per_weight(function)

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
