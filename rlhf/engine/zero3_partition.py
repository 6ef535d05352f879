"""Place or shard parameters on their device, one at a time, before DeepSpeed gets the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from rlhf.base.ranks import Ranks
from rlhf.base.types import keep_parameter
from rlhf.config.batches import BatchPlan
from rlhf.config.roles import SHARDED_WEIGHTS, Role, has_16_bit_weights, stage_of
from rlhf.engine.deepspeed_config import deepspeed_config
from rlhf.engine.devices import TORCH_DTYPES
from rlhf.engine.settings import EngineSettings


def build_parameter_placer(
    role: Role, *, settings: EngineSettings, plan: BatchPlan, ranks: Ranks
) -> Callable[[nn.Parameter], torch.Tensor | None] | None:
    """Return a function that puts a parameter where DeepSpeed keeps it, in the engine's precision.

    The function returns this rank's part (without sharding the whole parameter), or None if the
    parameter is sharded already. The torch engine copies weights of any precision to a GPU, so the
    function keeps them; on a CPU this engine needs fp32 weights, and there is no function.
    """
    if settings.runs_on_torch(role, ranks=ranks.size):
        return None if ranks.device.type == "cpu" else keep_parameter
    if stage_of(role, settings.zero) == SHARDED_WEIGHTS:
        return Partitioner(role, settings=settings, plan=plan, ranks=ranks)
    dtype = _weights_dtype(role, settings)

    def place_parameter(parameter: nn.Parameter) -> torch.Tensor:
        parameter.data = parameter.data.to(ranks.device, dtype)
        return parameter.data

    return place_parameter


def _weights_dtype(role: Role, settings: EngineSettings) -> torch.dtype:
    has_half = has_16_bit_weights(role, settings.zero, settings.dtype)
    return TORCH_DTYPES[settings.dtype] if has_half else torch.float32


class Partitioner:
    """A callable that replaces a parameter with this rank's shard, in the engine's precision.

    Every rank must have the same values, from a file or a seed: nothing is sent between ranks. If a
    parameter is stored in a memory-mapped file, only this rank's part is read.
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
        self._dtype = _weights_dtype(role, settings)
        skip_shm_kernel_compilation()
        self._init = deepspeed.zero.Init(config_dict_or_path=config)
        if self._init.mem_efficient_linear:
            # torch's linear function would keep the gathered weights until the backward pass.
            # DeepSpeed 0.19.8 replaces it only if DeepSpeed itself partitions whole modules.
            self._init._enable_mem_efficient_linear()

    @torch.no_grad()
    def __call__(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Shard ``parameter`` and return this rank's part; None if it is sharded already."""
        if hasattr(parameter, "ds_id"):
            return None
        parameter.data, shard = self._fill_own_shard(parameter.data)
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()  # type: ignore[attr-defined]
        return shard

    def _fill_own_shard(self, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor shaped like ``whole`` with only this rank's part filled, and that part.

        DeepSpeed 0.19.8 assigns rank r the elements from r * ceil(size / ranks) on. With a
        secondary partition (ZeRO++ hpZ) a rank keeps other elements too, so its part is the whole.
        """
        like = torch.empty(whole.shape, dtype=self._dtype, device=self._ranks.device)
        if self._init.zero_param_process_group is not None:
            return like.copy_(whole), like
        length = -(-whole.numel() // self._ranks.size)
        part = slice(self._ranks.rank * length, (self._ranks.rank + 1) * length)
        shard = like.view(-1)[part].copy_(whole.reshape(-1)[part])
        return like, shard


def skip_shm_kernel_compilation() -> None:
    """Keep DeepSpeed 0.19.8 from compiling its shared-memory collectives on a CPU.

    The collectives serve tensor-parallel inference, which is not used here. Compiling them needs a
    compiler, takes half a minute at the first start, and prints to the console. This function also
    skips DeepSpeed's check of all its ops (half a second per rank), and silences its warnings.
    """
    import logging

    import deepspeed

    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
