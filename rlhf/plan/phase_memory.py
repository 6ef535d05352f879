"""Compute the memory of one rank at each moment of a phase, under one ZeRO setting."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from rlhf.config.batches import rollout_plan
from rlhf.config.choices import Dtype, Phase
from rlhf.config.machine_rates import GIB
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.models.model_uses import ModelUse, forward_flops
from rlhf.options import Backend
from rlhf.plan import memory_model
from rlhf.plan.memory_model import ModelStates, Parts, backward_peak, uses_matmul_attention
from rlhf.plan.steps import Load
from rlhf.plan.time_model import CostModel, ForwardWork, forward_bytes, no_grad_pass_seconds

KEPT_FREED = 1.4  # ratio of allocated to used memory if the process keeps freed memory
PREPARATION_SECONDS = 1.0  # per phase, to tokenize its data and build its engines
LOAD_RATE = 0.5e9  # bytes of weights read or written per second
CPU_FRAGMENTATION = 0.03  # share of the memory lost to fragmentation on a CPU
GPU_FRAGMENTATION = 0.02  # share lost on a GPU with expandable segments (base/command.py)
MOST_FILLED = 0.97  # share of the rest of a GPU that a plan may fill: estimates can be 7 % off
CUDA_CONTEXT = 0.8 * GIB  # bytes of a process on a GPU, with its libraries' workspaces
NCCL_BYTES = 0.5 * GIB  # bytes of the buffers of several communicators: an estimate
CPU_PROCESS = 0.6 * GIB  # bytes of a process after its first steps, with torch and transformers
PHASE_GROWTH = 0.12 * GIB  # bytes of code and buffers that oneDNN and torch keep per phase
STEP_GROWTH = 0.2 * GIB  # bytes added by step MANY_STEPS, because matrices of new sizes occur
MANY_STEPS = 300
RECORD_BYTES = 2000  # bytes in memory per example


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """The memory and work of a phase under one ZeRO setting, for any micro-batch."""

    config: RunConfig
    at: CostModel
    phase: Phase
    models: tuple[ModelUse, ...]
    load: Load

    @cached_property
    def model_states(self) -> dict[Role, ModelStates]:
        """Return the bytes of each model's states: weights, gradients, optimizer and copies."""
        return {m.role: memory_model.model_state_bytes(self.at, m) for m in self.models}

    @property
    def tensor_parallel(self) -> int:
        """Return the number of ranks that share one copy of the weights while PPO samples."""
        rollout = self.config.rollout
        is_hybrid = rollout.backend is Backend.hybrid_engine
        return rollout.hybrid_engine.inference_tp_size if is_hybrid else 1

    @property
    def memory_limit(self) -> float:
        """Return the bytes that a plan may fill on one rank: less than what torch can use.

        Plans with the Hybrid Engine are for DeepSpeed-Chat's recipes, which fill their GPUs.
        """
        machine, backend = self.at.machine, self.config.rollout.backend
        if not machine.is_gpu:
            return machine.memory * (1 - CPU_FRAGMENTATION)
        most = 1.0 if backend is Backend.hybrid_engine else MOST_FILLED
        return machine.memory * (1 - GPU_FRAGMENTATION) * most

    @property
    def offloaded_bytes(self) -> int:
        """Return the bytes that one rank offloads to the host's memory or to NVMe."""
        return sum(states.host.total() for states in self.model_states.values())

    def resident_bytes(self, learner: ModelUse | None = None) -> Parts:
        """Return the bytes by purpose that stay allocated while ``learner`` (or no model) trains.

        The gradients of ``learner`` are not counted, but the gradients of models that step together
        with it are. DeepSpeed's stage 3 never frees gradients and their buckets.
        """
        role = None if learner is None else learner.role
        return self._resident_bytes_by_role[role].copy()  # the caller may change it

    @cached_property
    def _resident_bytes_by_role(self) -> dict[Role | None, Parts]:
        learners = (None, *(model.role for model in self.models))
        return {learner: self._compute_resident_bytes(learner) for learner in learners}

    def _compute_resident_bytes(self, learner: Role | None) -> Parts:
        parts: Parts = Counter()
        for model in self.models:
            states = self.model_states[model.role]
            held = Counter(states.device)
            if not self.at.machine.is_gpu:  # the ranks' memory is the host's memory
                held += states.host
            if bucket := self._gradient_bucket_bytes(model, kept=True):
                held["buffers"] = bucket
            elif not _keeps_gradients(self, model, learner):
                del held["gradients"]
            parts += held
        machine, config = self.at.machine, self.config
        if machine.is_gpu:
            parts["process"] = int(CUDA_CONTEXT + (NCCL_BYTES if machine.ranks > 1 else 0))
        else:
            parts["process"] = int(cpu_process_bytes(config, self.phase, self.load))
        return parts

    def training_peak(
        self, model: ModelUse, *, sequences: int, tokens: int, positions: int, passes: int
    ) -> Parts:
        """Return the peak bytes by purpose while ``model`` is trained on micro-batches.

        ``positions`` of the ``tokens`` tokens in each sequence get logits. An optimizer step has
        ``passes`` micro-batches.
        """
        at = self.at
        kept = memory_model.activation_bytes(at, model, sequences=sequences, tokens=tokens)
        if keeps_freed := self.config.hardware.keep_freed_memory:
            kept = round(kept * KEPT_FREED)
        is_sharded = at.is_sharded(model)
        attention = memory_model.attention_bytes(
            at,
            model,
            sequences=sequences,
            tokens=tokens,
            matrices=18 if keeps_freed else 3,  # 18: with freed matrices, which the process keeps
        )
        peak = backward_peak(
            at,
            model,
            tokens=sequences * tokens,
            positions=sequences * positions,
            activations=kept + memory_model.autocast_copy_bytes(at, model),
            attention=attention,
            gradients=0 if is_sharded else self.model_states[model.role].device["gradients"],
            is_first=passes == 1 and at.machine.is_gpu and not is_sharded,
        )
        buffers = self._gradient_bucket_bytes(model, kept=False)
        buffers += memory_model.gathered_weight_bytes(at, model)
        return self.resident_bytes(model) + Counter(buffers=buffers) + peak

    def scoring_peak(self, models: Iterable[ModelUse], *, sequences: int, tokens: int) -> Parts:
        """Return the peak bytes by purpose while the models score a micro-batch one by one."""
        at, batch, peaks = self.at, {"sequences": sequences, "tokens": tokens}, []
        for model in models:
            activations = memory_model.no_grad_pass_bytes(at, model, **batch)
            activations += memory_model.attention_bytes(at, model, **batch, matrices=2)
            gathered = memory_model.gathered_weight_bytes(at, model)
            peaks.append(Counter(activations=activations, buffers=gathered))
        return self.resident_bytes() + max(peaks, key=Counter.total)

    def forward_work(
        self, model: ModelUse, *, sequences: float, micro: int, answer: float | None = None
    ) -> ForwardWork:
        """Return the work of forward passes over ``sequences`` in micro-batches of size ``micro``.

        Each micro-batch is padded to its longest sequence. In PPO, ``answer`` response tokens
        follow each prompt, and only they get logits.
        """
        return _forward_work(
            model,
            self.load,
            sequences=sequences,
            micro=micro,
            is_sorted=self.config.data.bucket_by_length or answer is not None,
            answer=answer,
            size=self.at.bytes_per_weight(model),
            is_gpu=self.at.machine.is_gpu,
        )

    def no_grad_seconds(
        self, model: ModelUse, *, sequences: float, micro: int, answer: float | None = None
    ) -> float:
        """Return the seconds of passes without gradients; arguments are as in ``forward_work``."""
        work = self.forward_work(model, sequences=sequences, micro=micro, answer=answer)
        return no_grad_pass_seconds(self.at, model, work)

    @property
    def response_tokens(self) -> float:
        """Return the expected number of tokens of a PPO response or episode."""
        most = self.config.token_limit_after_prompt[1]
        return most if self.load.answer is None else self.load.answer

    @property
    def preparation_seconds(self) -> float:
        """Return the seconds to prepare the data, build the models and save them at the end."""
        weights = sum(model.weights * self.at.bytes_per_weight(model) for model in self.models)
        return PREPARATION_SECONDS + weights / LOAD_RATE

    def _gradient_bucket_bytes(self, model: ModelUse, *, kept: bool) -> int:
        """Return the bytes of the model's gradient buckets that are ``kept``, or else freed again.

        Stage 3 keeps its buckets allocated; other stages allocate buckets for each backward pass.
        """
        if kept is not self.at.is_sharded(model):
            return 0
        return memory_model.gradient_bucket_bytes(self.at, model)


def _keeps_gradients(scene: PhaseMemory, model: ModelUse, learner: Role | None) -> bool:
    """Return True if the gradients of ``model`` stay allocated while ``learner`` trains.

    On a GPU, critic and actor step one after another, except in fp16 with ppo.align_overflow, where
    an overflow skips both steps. A CPU process keeps the memory of freed gradients.
    """
    if learner is None or learner is model.role:
        return False
    is_fp16 = scene.at.machine.dtype is Dtype.fp16 and scene.config.ppo.align_overflow
    return not scene.at.machine.is_gpu or (is_fp16 and learner is Role.actor)


@lru_cache(maxsize=10_000)  # cached: most ZeRO settings have equal work
def _forward_work(
    model: ModelUse,
    load: Load,
    *,
    sequences: float,
    micro: int,
    is_sorted: bool,
    answer: float | None,
    size: int,
    is_gpu: bool,
) -> ForwardWork:
    passes = math.ceil(sequences / micro)
    lengths = load.padded_widths(passes, micro=micro, is_sorted=is_sorted)
    operations = touched = padded = 0.0
    for length, count in Counter(lengths).items():
        tokens = length + (answer or 0)
        share = count * sequences / len(lengths)
        padded += share * tokens
        positions = tokens if answer is None else answer
        each = {"sequences": share, "tokens": tokens, "positions": positions}
        operations += forward_flops(model, **each)
        products = uses_matmul_attention(tokens, is_gpu=is_gpu)
        touched += forward_bytes(model, **each, size=size, products=products)
    return ForwardWork(operations, touched, passes, padded)


def cpu_process_bytes(config: RunConfig, phase: Phase, load: Load) -> float:
    """Return the bytes of a CPU process without models: libraries, examples and cached buffers.

    oneDNN and torch keep code and buffers for every size of matrix product that has occurred.
    """
    order = config.phase.order
    earlier = order.index(phase) if phase in order else 0
    steps = load.steps or 0
    if phase is Phase.ppo:
        steps *= config.ppo.ppo_epochs * rollout_plan(config).mini_batches
    sizes = (earlier + 1) * STEP_GROWTH * min(1.0, steps / MANY_STEPS)
    return CPU_PROCESS + RECORD_BYTES * load.records + earlier * PHASE_GROWTH + sizes
