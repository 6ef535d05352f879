"""Compute the memory that a process takes before it has any models."""

from __future__ import annotations

from rlhf.config.batches import rollout_plan
from rlhf.config.choices import Phase
from rlhf.config.machine_rates import GIB
from rlhf.config.schema.run import RunConfig
from rlhf.planning.steps import Load

CUDA_CONTEXT = 0.8 * GIB  # bytes of a process on a GPU, with its libraries' workspaces
NCCL = 0.5 * GIB  # bytes of the buffers of several communicators: an estimate
CPU_PROCESS = 0.6 * GIB  # bytes of a process after its first steps, with torch and transformers
PHASE_GROWTH = 0.12 * GIB  # bytes of code and buffers that oneDNN and torch keep per phase
STEP_GROWTH = 0.2 * GIB  # further bytes after MANY_STEPS steps, for products of more sizes
MANY_STEPS = 300
RECORD = 2000  # bytes per example in memory


def gpu_bytes_of_process(*, ranks: int) -> float:
    """Return the GPU bytes of a process without models; more if there are several ``ranks``."""
    return CUDA_CONTEXT + (NCCL if ranks > 1 else 0.0)


def cpu_process_bytes(config: RunConfig, phase: Phase, load: Load) -> float:
    """Return the bytes of a CPU process without models: libraries, examples and kept buffers.

    oneDNN and torch keep code and buffers for every size of matrix product that has occurred.
    """
    order = config.phase.order
    earlier = order.index(phase) if phase in order else 0
    steps = load.steps or 0
    if phase is Phase.ppo:
        steps *= config.ppo.ppo_epochs * rollout_plan(config).mini_batches
    sizes = (earlier + 1) * STEP_GROWTH * min(1.0, steps / MANY_STEPS)
    return CPU_PROCESS + RECORD * load.records + earlier * PHASE_GROWTH + sizes
