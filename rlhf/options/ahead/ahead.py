"""Sampling of responses some steps before PPO learns from them (rollout.lag)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf.base.ranks import Ranks
from rlhf.base.stored_responses import (
    FACTS,
    join_rows,
    own_responses,
    pack_responses,
    packed_tensor_names,
    unpack_responses,
)
from rlhf.base.types import Engine, PromptBatch, Responses, RolloutBackend, TensorSlice

STEPS = "steps"  # name of a checkpoint's tensor: the numbers of the steps with pending responses


class StepSampler(Protocol):
    """A sampler of the responses of whole steps, between training steps or during training."""

    def begin_sampling(self, actor: Engine, batches: Sequence[PromptBatch]) -> None:
        """Begin to sample the responses of one or more steps with the actor's current weights."""

    def wait_for_responses(self, step: int) -> Responses:
        """Return this rank's responses of ``step``, once they are sampled."""


class SamplingInTurn:
    """A ``StepSampler`` that samples in this process, between two steps of training."""

    def __init__(self, backend: RolloutBackend) -> None:
        self._backend = backend
        self._finished: dict[int, Responses] = {}

    def begin_sampling(self, actor: Engine, batches: Sequence[PromptBatch]) -> None:
        """Sample the responses of each batch."""
        for prompts in batches:
            assert prompts.step is not None, "training prompts must have a step"
            self._finished[prompts.step] = self._backend.generate(actor, prompts)

    def wait_for_responses(self, step: int) -> Responses:
        """Return the responses of ``step``."""
        return self._finished.pop(step)


@dataclass
class SamplingAhead:
    """A ``RolloutBackend`` that samples step t with the weights after step t - 1 - ``lag``.

    The first ``lag`` + 1 steps are sampled with the weights before training. The weights of a step
    depend on its number only, never on how long sampling takes. Pending responses, which later
    steps learn from, are part of a checkpoint: they are smaller than the weights that sampled them.
    """

    sampler: StepSampler
    prompts_of: Callable[[int], PromptBatch]
    lag: int
    steps: int
    pad_id: int
    ranks: Ranks
    _begun: int = field(default=0, init=False)  # the last step for which sampling has begun
    # Pending responses, which were collected for a checkpoint, or read from one.
    _pending: dict[int, Responses] = field(default_factory=dict, init=False)
    # Pending responses of all ranks, packed.
    _stored: list[TensorSlice] = field(default_factory=list, init=False)
    _next: int = field(default=1, init=False)  # the step whose responses are requested next

    def generate(self, actor: Engine, prompts: PromptBatch) -> Responses:
        """Return the responses of the step of ``prompts``; begin to sample the steps after it."""
        step = prompts.step
        assert step is not None, "evaluations sample with the current weights"
        last = min(step + self.lag, self.steps)
        coming = range(max(step, self._begun + 1), last + 1)
        if coming:
            batches = [prompts if i == step else self.prompts_of(i) for i in coming]
            self.sampler.begin_sampling(actor, batches)
            self._begun = last
        self._next = step + 1
        return self._pending.pop(step, None) or self.sampler.wait_for_responses(step)

    def wait_for_begun_steps(self) -> None:
        """Wait for the responses of all steps whose sampling has begun; keep them as pending."""
        for step in range(self._next, self._begun + 1):
            if step not in self._pending:
                self._pending[step] = self.sampler.wait_for_responses(step)

    @property
    def training_state(self) -> SamplingAhead:
        """Wait for the pending responses of all ranks; return this object, which streams them."""
        self.wait_for_begun_steps()
        self._stored = [(STEPS, 0, torch.tensor(sorted(self._pending), dtype=torch.long))]
        for step, responses in sorted(self._pending.items()):
            parts = [unpack_responses(p) for p in self.ranks.all_gather(pack_responses(responses))]
            packed = pack_responses(join_rows(parts, pad_id=self.pad_id))
            self._stored += [(f"{step}/{name}", 0, tensor) for name, tensor in packed.items()]
        return self

    @property
    def total_bytes(self) -> int:
        """Return the size of the pending responses of all ranks in bytes."""
        return sum(tensor.nbytes for _, _, tensor in self._stored)

    def stream(self) -> Iterator[TensorSlice]:
        """Return the pending responses of all ranks on rank 0, and nothing on other ranks."""
        return iter(self._stored if self.ranks.is_main else [])

    def load(self, read_part: Callable[[str, slice], Tensor]) -> None:
        """Read a checkpoint's pending responses with ``read_part``; keep this rank's rows."""
        every = slice(None)
        self._pending = {}
        for step in read_part(STEPS, every).tolist():
            names = packed_tensor_names(read_part(f"{step}/{FACTS}", every))
            whole = unpack_responses({n: read_part(f"{step}/{n}", every) for n in [FACTS, *names]})
            self._pending[step] = own_responses(whole, self.ranks)
            self._begun = step

    def state_dict(self) -> dict[str, Any]:
        """Return {}: the state consists of tensors only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: ``load`` restores the tensors."""


class AfterSampling:
    """A ``RolloutBackend`` for evaluations on the server that a sampling process uses too.

    The server has the weights of one rollout at a time, so this backend waits until the process has
    sampled all the steps that ``ahead`` has begun.
    """

    def __init__(self, backend: RolloutBackend, ahead: SamplingAhead) -> None:
        self._backend = backend
        self._ahead = ahead

    def generate(self, actor: Engine, prompts: PromptBatch) -> Responses:
        """Wait until the process has sampled all its steps; then return one response per prompt."""
        self._ahead.wait_for_begun_steps()
        return self._backend.generate(actor, prompts)
