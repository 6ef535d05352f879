"""Compute the memory of one rank at each moment of a phase, under one ZeRO setting."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from rlhf.config.batches import rollout_plan
from rlhf.config.choices import Backend, Phase
from rlhf.config.roles import SHARDED_WEIGHTS, Role, stage_of
from rlhf.config.schema.run import RunConfig
from rlhf.planning import memory_model
from rlhf.planning.hardware import GIB
from rlhf.planning.memory_model import Parts, States
from rlhf.planning.model_uses import ModelUse
from rlhf.planning.steps import Load
from rlhf.planning.time_model import CostModel, Pass, forward_bytes, forward_operations

CUDA_CONTEXT = 0.8 * GIB  # bytes of a process on a GPU, with its libraries' workspaces
NCCL = 0.5 * GIB  # bytes of the buffers of several communicators: an estimate
CPU_PROCESS = 0.6 * GIB  # bytes of a process after its first steps, with torch and transformers
KEPT_FREED = 1.4  # ratio to the memory in use, if the process keeps freed blocks of other lengths
PHASE_GROWTH = 0.12 * GIB  # bytes of code and buffers that oneDNN and torch keep per phase
STEP_GROWTH = 0.2 * GIB  # further bytes after MANY_STEPS steps: products of other sizes
MANY_STEPS = 300
RECORD = 2000  # bytes per example in memory
PREPARING = 1.0  # seconds per phase to tokenize its data and build its engines
LOADED = 0.5e9  # bytes of weights read or written per second
FRAGMENTED = 0.03  # share of the memory that is lost between blocks,
FRAGMENTED_GPU = 0.02  # and on a GPU, whose segments grow (rlhf/engine/devices.py)


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """A phase under one ZeRO setting, before its micro-batches are chosen."""

    config: RunConfig
    at: CostModel
    phase: Phase
    models: tuple[ModelUse, ...]
    load: Load
    states: dict[Role, States] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: RunConfig,
        at: CostModel,
        phase: Phase,
        load: Load,
        models: tuple[ModelUse, ...],
    ) -> PhaseMemory:
        """Build a phase of ``config``, with the memory that the states of its ``models`` take."""
        machine = at.machine
        states = {
            model.role: memory_model.model_states(
                model,
                zero=at.zero,
                dtype=machine.dtype,
                ranks=machine.ranks,
                is_hybrid=_is_hybrid(config, phase, model),
            )
            for model in models
        }
        return cls(config=config, at=at, phase=phase, models=models, load=load, states=states)

    @property
    def limit(self) -> float:
        """Return the bytes that one rank may use."""
        machine = self.at.machine
        return machine.memory * (1 - (FRAGMENTED_GPU if machine.is_gpu else FRAGMENTED))

    @property
    def host(self) -> int:
        """Return the bytes that one rank keeps in the host's memory or on NVMe."""
        return sum(states.host.total() for states in self.states.values())

    def resident(self, *, learning: bool) -> Parts:
        """Return the bytes by purpose that stay allocated, with gradients if ``learning``.

        DeepSpeed's stage 3 never frees its gradients and the buckets that it reduces them in.
        """
        return self._residents[learning].copy()  # for the caller to add to

    @cached_property
    def _residents(self) -> dict[bool, Parts]:
        return {learning: self._resident(learning=learning) for learning in (False, True)}

    def _resident(self, *, learning: bool) -> Parts:
        parts: Parts = Counter()
        for model in self.models:
            states = self.states[model.role]
            held = Counter(states.device)
            if not self.at.machine.is_gpu:  # the ranks' memory is the host's memory
                held += states.host
            if bucket := self._bucket(model, kept=True):
                held["buffers"] = bucket
            elif not learning:
                del held["gradients"]
            parts += held
        parts["process"] = int(self._gpu_process if self.at.machine.is_gpu else self._cpu_process)
        return parts

    @property
    def _gpu_process(self) -> float:
        """Return the bytes that a rank takes on a GPU without models."""
        return CUDA_CONTEXT + (NCCL if self.at.machine.ranks > 1 else 0.0)

    @property
    def _cpu_process(self) -> float:
        """Return the bytes of a CPU process without models: libraries, records, kept buffers.

        oneDNN and torch keep code and buffers for every size of matrix product so far.
        """
        order = self.config.phase.order
        earlier = order.index(self.phase) if self.phase in order else 0
        steps = self.load.steps or 0
        if self.phase is Phase.ppo:
            steps *= self.config.ppo.ppo_epochs * rollout_plan(self.config).mini_batches
        sizes = (earlier + 1) * STEP_GROWTH * min(1.0, steps / MANY_STEPS)
        return CPU_PROCESS + RECORD * self.load.records + earlier * PHASE_GROWTH + sizes

    def learning(self, model: ModelUse, *, sequences: int, tokens: int, positions: int) -> Parts:
        """Return the bytes by purpose while ``model`` is trained on one micro-batch.

        ``positions`` of the ``tokens`` tokens in each sequence get logits. Ranks that share their
        sequences divide activations, logits and scores, but not gathered weights and buckets.
        """
        size, share = self.at.size(model), self.at.zero.sequence_parallel_size
        kept = memory_model.activations(
            model,
            sequences=sequences,
            tokens=tokens,
            size=size,
            uses_matmul_attention=self.uses_matmul_attention(tokens),
            share=share,
        )
        if self.config.hardware.keep_freed_memory:
            kept = round(kept * KEPT_FREED)
        kept += memory_model.autocast_copies(model, size=size, dtype=self.at.machine.dtype)
        picked = math.ceil(sequences * positions / share)
        logits = memory_model.logits(
            model, positions=picked, size=size, is_gpu=self.at.machine.is_gpu
        )
        scores = self._scores(model, sequences, tokens, self._matrices) // share
        # The logits are freed before the backward pass of the layers starts.
        return self.resident(learning=True) + Counter(
            activations=kept + max(0, scores - logits),
            logits=logits,
            buffers=self._bucket(model, kept=False) + self.live(model),
        )

    def reading(self, models: Iterable[ModelUse], *, sequences: int, tokens: int) -> Parts:
        """Return the peak bytes by purpose while the models score a micro-batch in turn."""
        each = []
        for model in models:
            activations = memory_model.reading(
                model,
                sequences=sequences,
                tokens=tokens,
                size=self.at.size(model),
                is_gpu=self.at.machine.is_gpu,
            )
            activations += self._scores(model, sequences, tokens, 2)
            each.append(Counter(activations=activations, buffers=self.live(model)))
        return self.resident(learning=False) + max(each, key=Counter.total)

    def work(
        self, model: ModelUse, *, sequences: float, micro: int, answer: float | None = None
    ) -> Pass:
        """Return the work of forward passes over ``sequences`` in micro-batches of size ``micro``.

        Each micro-batch is padded to its longest sequence. In PPO, ``answer`` response tokens
        follow each prompt, and only they get logits. Ranks that share their sequences divide it.
        """
        is_sorted = self.config.data.bucket_by_length or answer is not None
        lengths = self.load.padded(math.ceil(sequences / micro), micro=micro, is_sorted=is_sorted)
        return _work(
            model,
            lengths,
            sequences=sequences,
            answer=answer,
            size=self.at.size(model),
            is_gpu=self.at.machine.is_gpu,
            share=self.at.zero.sequence_parallel_size,
        )

    @property
    def answer(self) -> float:
        """Return the expected tokens of a PPO response."""
        most = self.config.rollout.max_response_tokens
        return most if self.load.answer is None else self.load.answer

    @property
    def preparing(self) -> float:
        """Return the seconds to prepare the data, build the models and save them at the end."""
        weights = sum(model.weights * self.at.size(model) for model in self.models)
        return PREPARING + weights / LOADED

    def live(self, model: ModelUse) -> int:
        """Return the bytes of weights that a pass over a sharded model has gathered."""
        zero, machine = self.at.zero, self.at.machine
        return memory_model.live_weights(model, zero=zero, ranks=machine.ranks, dtype=machine.dtype)

    def _bucket(self, model: ModelUse, *, kept: bool) -> int:
        """Return the bytes of gradient buckets: at stage 3 if ``kept``, at other stages if not."""
        zero, machine = self.at.zero, self.at.machine
        if kept is not (stage_of(model.role, zero) == SHARDED_WEIGHTS):
            return 0
        return memory_model.reduce_buckets(
            model,
            zero=zero,
            dtype=machine.dtype,
            ranks=machine.ranks,
            is_hybrid=_is_hybrid(self.config, self.phase, model),
        )

    def uses_matmul_attention(self, tokens: float) -> bool:
        """Return True if attention uses matrix products instead of the fused kernel."""
        return uses_matmul_attention(tokens, is_gpu=self.at.machine.is_gpu)

    @property
    def _matrices(self) -> int:
        """Return the matrices of scores in a backward pass, with freed ones that stay allocated."""
        return 3 * (6 if self.config.hardware.keep_freed_memory else 1)

    def _scores(self, model: ModelUse, sequences: int, tokens: int, matrices: int) -> int:
        """Return the bytes of ``matrices`` score matrices per head; 0 if attention is fused."""
        if not (self.uses_matmul_attention(tokens) or model.shape.keeps_scores):
            return 0
        return matrices * memory_model.scores(
            model.shape, sequences=sequences, tokens=tokens, size=self.at.size(model)
        )


def _is_hybrid(config: RunConfig, phase: Phase, model: ModelUse) -> bool:
    """Return True if DeepSpeed's Hybrid Engine generates with ``model``."""
    is_asked = config.rollout.backend is Backend.hybrid_engine
    return is_asked and phase is Phase.ppo and model.role is Role.actor


def uses_matmul_attention(tokens: float, *, is_gpu: bool) -> bool:
    """Return True if attention uses matrix products, and False if it uses the fused kernel."""
    return not is_gpu and tokens <= memory_model.LONGEST


@lru_cache(maxsize=10_000)  # a plan needs the same work under every ZeRO setting
def _work(
    model: ModelUse,
    lengths: tuple[int, ...],
    *,
    sequences: float,
    answer: float | None,
    size: int,
    is_gpu: bool,
    share: int,
) -> Pass:
    """Return the work of passes over ``sequences`` in micro-batches padded to ``lengths``.

    ``share`` ranks divide it.
    """
    operations = touched = 0.0
    for length, count in Counter(lengths).items():
        tokens = length + (answer or 0)
        each = {
            "sequences": count * sequences / len(lengths),
            "tokens": tokens,
            "positions": tokens if answer is None else answer,
        }
        operations += forward_operations(model, **each)
        products = uses_matmul_attention(tokens, is_gpu=is_gpu)
        touched += forward_bytes(model, **each, size=size, products=products)
    tokens = sequences * sum(lengths) / len(lengths)
    return Pass(operations / share, touched / share, len(lengths), tokens / share)
