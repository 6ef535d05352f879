"""The training state of a model under DeepSpeed, whatever its ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.base.ranks import Ranks
from rlhf.config.roles import SHARDED_WEIGHTS
from rlhf.engine.masters import Masters, masters_of
from rlhf.engine.training_state import (
    ParameterPlace,
    Piece,
    TrainingState,
    adamw_moments,
    adamw_steps,
    set_adamw_steps,
)


class DeepSpeedState:
    """The state of a DeepSpeed engine that training changes: tensors and counters."""

    def __init__(self, engine: Any, ranks: Ranks, *, stage: int) -> None:
        self._engine = engine
        self._stage = stage
        self._ranks = ranks

    def build_training_state(self, average: Sequence[Tensor] | None) -> TrainingState:
        """Return the training state; ``average`` has this rank's shards of the moving average."""
        places = _parameter_places(self._engine, self._ranks, stage=self._stage)
        masters, shards = self._masters(), self._shards()
        moments = [adamw_moments(self._adamw, shard) for shard in shards]
        ranks = self._ranks if self._stage else Ranks()  # at stage 0 every rank has whole tensors
        return TrainingState(places, masters, moments, average, ranks)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters of schedule and optimizer, and the loss scaler."""
        # Only an optimizer of stage 1 or higher scales losses.
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        scaled = {} if scaler is None else vars(scaler)
        return {
            "steps": self._engine.lr_scheduler.last_epoch,
            "adamw_steps": adamw_steps(self._adamw, self._shards()),
            "loss_scaler": {k: v for k, v in scaled.items() if isinstance(v, int | float)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state`` that ``state_dict`` returned."""
        scheduler = self._engine.lr_scheduler
        scheduler.last_epoch = state["steps"]
        scheduler._step_count = state["steps"] + 1
        scheduler._last_lr = scheduler.get_lr()
        set_adamw_steps(self._adamw, self._shards(), state["adamw_steps"])
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
        return masters_of(self._engine, stage=self._stage)

    def _shards(self) -> list[Tensor]:
        """Return the shards of the masters, which are AdamW's parameters."""
        return [shard for shard in self._masters().shards if isinstance(shard, Tensor)]


def _parameter_places(engine: Any, ranks: Ranks, *, stage: int) -> list[ParameterPlace]:
    """Return each trained parameter of a DeepSpeed engine with its place in the masters' shards.

    ``masters_of`` returns these shards. DeepSpeed 0.19.8 keeps the places in attributes of
    parameters (stages 1 and 2) or of its optimizer (stage 3).
    """
    trained = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
    if stage == 0:
        sizes = [(name, parameter.numel()) for name, parameter in trained]
        return [ParameterPlace(n, size, Piece(i, 0, 0, size)) for i, (n, size) in enumerate(sizes)]
    if stage == SHARDED_WEIGHTS:
        return [ParameterPlace(n, p.ds_numel, _sharded_piece(engine, p, ranks)) for n, p in trained]
    return [ParameterPlace(name, p.numel(), _flat_piece(p)) for name, p in trained]


def _flat_piece(parameter: Any) -> Piece:
    mapping = parameter._hp_mapping
    if mapping is None:  # this rank stores nothing of the parameter
        return Piece(0, 0, 0, 0)
    inside, in_shard = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Piece(mapping.param_group_index, in_shard.start, inside.start, inside.numel)


def _sharded_piece(engine: Any, parameter: Any, ranks: Ranks) -> Piece:
    optimizer = engine.optimizer
    shard, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = min(length * ranks.rank, parameter.ds_numel)
    return Piece(shard, offset, start, min(length, parameter.ds_numel - start))
