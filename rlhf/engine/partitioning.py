"""Taking parameters apart over the ranks one at a time, before DeepSpeed has the whole model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from rlhf.config.checks import BatchPlan
from rlhf.config.choices import Dtype
from rlhf.config.roles import SHARDED_WEIGHTS, Role, has_half_weights, stage_of
from rlhf.engine.ds_config import deepspeed_config
from rlhf.engine.settings import EngineSettings, runs_on_torch
from rlhf.types import Ranks

HALF_DTYPES = {Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16}


def partitioner(
    role: Role, *, settings: EngineSettings, plan: BatchPlan, ranks: Ranks
) -> Callable[[nn.Parameter], None] | None:
    """What shards a parameter as the model's engine will have it; None where none is sharded."""
    is_sharded = stage_of(role, settings.zero) == SHARDED_WEIGHTS
    if not is_sharded or runs_on_torch(role, settings, ranks=ranks.size):
        return None
    return Partitioner(role, settings=settings, plan=plan, ranks=ranks)


class Partitioner:
    """Puts this rank's part of a parameter in the place of the whole, in the engine's precision.

    Every rank must have the same values, from a file or a seed: nothing is sent between ranks, and
    of a parameter that lies in a mapped file only this rank's part is read.
    """

    def __init__(
        self, role: Role, *, settings: EngineSettings, plan: BatchPlan, ranks: Ranks
    ) -> None:
        import deepspeed

        zero = settings.zero
        config = deepspeed_config(
            role,
            zero=zero,
            dtype=settings.dtype,
            plan=plan,
            max_grad_norm=0.0,
            ranks=ranks.size,
        )
        self._ranks = ranks
        is_half = has_half_weights(role, zero, settings.dtype)
        self._dtype = HALF_DTYPES[settings.dtype] if is_half else torch.float32
        leave_uncompiled_kernels_alone()
        self._init = deepspeed.zero.Init(config_dict_or_path=config)
        if self._init.mem_efficient_linear:
            # As for a module that DeepSpeed 0.19.8 partitions itself: torch's own linear layer
            # would keep the gathered weights until the backward pass.
            self._init._enable_mem_efficient_linear()

    @torch.no_grad()
    def __call__(self, parameter: nn.Parameter) -> None:
        """Shard ``parameter``; one that is sharded already stays as it is."""
        if hasattr(parameter, "ds_id"):
            return
        parameter.data = self._own_part(parameter.data)
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()  # type: ignore[attr-defined]

    def _own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """A tensor like ``whole`` that is written, and so takes memory, only where it is kept.

        DeepSpeed 0.19.8 gives rank r the elements from r * ceil(size / ranks) on. With a second
        partition among the ranks of a node (ZeRO++) it keeps others too.
        """
        like = torch.empty(whole.shape, dtype=self._dtype, device=self._ranks.device)
        if self._init.zero_param_process_group is not None:
            return like.copy_(whole)
        length = -(-whole.numel() // self._ranks.size)
        part = slice(self._ranks.rank * length, (self._ranks.rank + 1) * length)
        like.view(-1)[part].copy_(whole.reshape(-1)[part])
        return like


def leave_uncompiled_kernels_alone() -> None:
    """Keep DeepSpeed 0.19.8 from compiling its shared-memory collectives on a CPU.

    They serve tensor-parallel inference, which is not used here; building them takes a compiler and
    half a minute at the first start, and prints.
    """
    import logging

    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
