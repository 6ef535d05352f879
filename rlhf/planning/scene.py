"""One phase under given ZeRO settings: its models, and what a rank holds at each moment."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from rlhf.config.checks import rollout_plan
from rlhf.config.choices import Phase
from rlhf.config.roles import SHARDED_WEIGHTS, Role, stage_of
from rlhf.config.schema import RunConfig
from rlhf.planning import memory
from rlhf.planning.machine import GIB
from rlhf.planning.memory import Parts, States
from rlhf.planning.models import ModelUse
from rlhf.planning.timing import Pass, Setting, forward_bytes, forward_operations
from rlhf.planning.workload import Load

CUDA_CONTEXT = 0.8 * GIB  # of a process on a GPU, with its libraries' workspaces
CPU_PROCESS = 0.6 * GIB  # of a process with torch and transformers loaded, after its first steps
KEPT_FREED = 1.4  # over the memory in use, if freed blocks of other lengths stay in the process
PHASE_GROWTH = 0.12 * GIB  # code and buffers of a phase that oneDNN and torch keep on a CPU
STEP_GROWTH = 0.2 * GIB  # more of them after many steps: products of other sizes
MANY_STEPS = 300
RECORD = 2000  # bytes of an example in memory
PREPARING = 1.0  # seconds of a phase in which its data is tokenised and its engines are made
LOADED = 0.5e9  # bytes of weights that are read or written per second
FRAGMENTED = 0.03  # of the memory, lost between blocks


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One phase under one ZeRO setting, before its micro-batches are chosen."""

    config: RunConfig
    at: Setting
    phase: Phase
    models: tuple[ModelUse, ...]
    load: Load
    states: dict[Role, States] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: RunConfig,
        at: Setting,
        phase: Phase,
        load: Load,
        models: tuple[ModelUse, ...],
    ) -> Scene:
        """The phase of a configuration, with the states of its ``models``."""
        machine = at.machine
        states = {
            model.role: memory.model_states(
                model, zero=at.zero, dtype=machine.dtype, ranks=machine.ranks
            )
            for model in models
        }
        return cls(config=config, at=at, phase=phase, models=models, load=load, states=states)

    @property
    def limit(self) -> float:
        """Bytes that one rank may use."""
        return self.at.machine.memory * (1 - FRAGMENTED)

    @property
    def host(self) -> int:
        """Bytes that one rank keeps in the host's memory or on NVMe."""
        return sum(states.host.total() for states in self.states.values())

    def resident(self, *, learning: bool) -> Parts:
        """What is there all the time; gradients while the phase learns.

        DeepSpeed's stage 3 frees neither its gradients nor what it reduces them in.
        """
        parts: Parts = Counter()
        for model in self.models:
            states = self.states[model.role]
            held = Counter(states.device)
            if not self.at.machine.is_gpu:  # its memory is the host's
                held += states.host
            if bucket := self._bucket(model, kept=True):
                held["buffers"] = bucket
            elif not learning:
                del held["gradients"]
            parts += held
        parts["process"] = int(CUDA_CONTEXT if self.at.machine.is_gpu else self._cpu_process)
        return parts

    @property
    def _cpu_process(self) -> float:
        """What a process on a CPU holds beside models: libraries, records, and what phases leave.

        oneDNN and torch keep code and buffers for every size of product that has come.
        """
        order = self.config.phase.order
        earlier = order.index(self.phase) if self.phase in order else 0
        steps = self.load.steps or 0
        if self.phase is Phase.ppo:
            steps *= self.config.ppo.ppo_epochs * rollout_plan(self.config).mini_batches
        sizes = (earlier + 1) * STEP_GROWTH * min(1.0, steps / MANY_STEPS)
        return CPU_PROCESS + RECORD * self.load.records + earlier * PHASE_GROWTH + sizes

    def learning(self, model: ModelUse, *, sequences: int, tokens: int, positions: int) -> Parts:
        """The moment at which ``model`` is trained on one micro-batch."""
        size = self.at.size(model)
        by_products = self.attends_by_products(tokens)
        kept = memory.activations(
            model, sequences=sequences, tokens=tokens, size=size, by_products=by_products
        )
        if self.config.hardware.keep_freed_memory:
            kept = round(kept * KEPT_FREED)
        kept += memory.autocast_copies(model, size=size, dtype=self.at.machine.dtype)
        logits = memory.logits(model, positions=sequences * positions, size=size)
        # The logits are gone when the layers' backward pass begins.
        return self.resident(learning=True) + Counter(
            activations=kept
            + max(0, self._scores(model, sequences, tokens, self._matrices) - logits),
            logits=logits,
            buffers=self._bucket(model, kept=False) + self.live(model),
        )

    def reading(self, models: Iterable[ModelUse], *, sequences: int, tokens: int) -> Parts:
        """The moment at which the models score one micro-batch, one after another."""
        each = [
            Counter(
                activations=memory.reading(
                    model, sequences=sequences, tokens=tokens, size=self.at.size(model)
                )
                + self._scores(model, sequences, tokens, 2),
                buffers=self.live(model),
            )
            for model in models
        ]
        return self.resident(learning=False) + max(each, key=Counter.total)

    def work(
        self, model: ModelUse, *, sequences: float, micro: int, answer: float | None = None
    ) -> Pass:
        """Forward passes over ``sequences``, ``micro`` at once, each padded to its longest.

        ``answer`` tokens follow each one in PPO, where only they get logits.
        """
        is_sorted = self.config.data.bucket_by_length or answer is not None
        lengths = self.load.padded(math.ceil(sequences / micro), micro=micro, is_sorted=is_sorted)
        return _work(
            model,
            tuple(lengths),
            sequences=sequences,
            answer=answer,
            size=self.at.size(model),
            is_gpu=self.at.machine.is_gpu,
        )

    @property
    def answer(self) -> float:
        """Tokens of a response of PPO, as expected."""
        most = self.config.rollout.max_response_tokens
        return most if self.load.answer is None else self.load.answer

    @property
    def preparing(self) -> float:
        """Seconds until the models are built, and saved at the end."""
        weights = sum(model.weights * self.at.size(model) for model in self.models)
        return PREPARING + weights / LOADED

    def live(self, model: ModelUse) -> int:
        """Weights that a pass over a sharded model has gathered."""
        zero, machine = self.at.zero, self.at.machine
        return memory.live_weights(model, zero=zero, ranks=machine.ranks, dtype=machine.dtype)

    def _bucket(self, model: ModelUse, *, kept: bool) -> int:
        """What its gradients are reduced in, where that is kept for good, or where it is not."""
        zero, machine = self.at.zero, self.at.machine
        if kept is not (stage_of(model.role, zero) == SHARDED_WEIGHTS):
            return 0
        return memory.reduce_buckets(model, zero=zero, dtype=machine.dtype, ranks=machine.ranks)

    def attends_by_products(self, tokens: float) -> bool:
        """Whether attention is that by matrix products, not the fused one."""
        return attends_by_products(tokens, is_gpu=self.at.machine.is_gpu)

    @property
    def _matrices(self) -> int:
        """Matrices of scores of a backward pass, with what freed ones of other sizes leave."""
        return 3 * (6 if self.config.hardware.keep_freed_memory else 1)

    def _scores(self, model: ModelUse, sequences: int, tokens: int, matrices: int) -> int:
        """What attention works in."""
        if not (self.attends_by_products(tokens) or model.shape.keeps_scores):
            return 0
        return matrices * memory.scores(
            model.shape, sequences=sequences, tokens=tokens, size=self.at.size(model)
        )


def attends_by_products(tokens: float, *, is_gpu: bool) -> bool:
    """Return True if attention computes matrix products, and False if it is the fused one."""
    return not is_gpu and tokens <= memory.LONGEST


@lru_cache(maxsize=10_000)  # a plan asks for the same work under every ZeRO setting
def _work(
    model: ModelUse,
    lengths: tuple[int, ...],
    *,
    sequences: float,
    answer: float | None,
    size: int,
    is_gpu: bool,
) -> Pass:
    """Return the passes over ``sequences`` in micro-batches that are padded to ``lengths``."""
    operations = touched = 0.0
    for length, count in Counter(lengths).items():
        tokens = length + (answer or 0)
        each = {
            "sequences": count * sequences / len(lengths),
            "tokens": tokens,
            "positions": tokens if answer is None else answer,
        }
        operations += forward_operations(model, **each)
        products = attends_by_products(tokens, is_gpu=is_gpu)
        touched += forward_bytes(model, **each, size=size, products=products)
    return Pass(operations, touched, len(lengths))
