"""The configuration of a run's models on one rank of another machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhf.config.choices import Backend, Device, Dtype, TrainingEngine
from rlhf.config.freeze import MICRO_BATCHES
from rlhf.config.schema.run import RunConfig
from rlhf.config.schema.zero import ZeroConfig


def config_for_one_rank(config: RunConfig, device: Device, dtype: Dtype) -> RunConfig:
    """Return the configuration for one rank of ``device`` that needs neither server nor drive.

    Micro-batch sizes are kept on a GPU and become null on a CPU. ``dtype`` must not be auto.
    """
    rollout = config.rollout
    if rollout.backend in (Backend.hybrid_engine, Backend.vllm_server):
        rollout = replace(rollout, backend=Backend.fast)
    hardware = replace(config.hardware, device=device, dtype=dtype, nodes=1, ranks_per_node=1)
    groups: dict[str, Any] = {key.partition(".")[0]: None for key in MICRO_BATCHES}
    for name in groups:
        micro = getattr(config, name).micro_batch_size if device is Device.cuda else None
        groups[name] = replace(getattr(config, name), micro_batch_size=micro)
    groups["ppo"] = replace(groups["ppo"], steps=groups["ppo"].steps or 1)
    zero = _remove_sharding(config.zero)
    return replace(config, hardware=hardware, rollout=rollout, zero=zero, **groups)


def _remove_sharding(zero: ZeroConfig) -> ZeroConfig:
    """Return ``zero`` without sharded, offloaded and quantized weights.

    Stages above 1 become 1, which keeps the precision of weights and masters.
    """
    return replace(
        zero,
        engine=TrainingEngine.auto,
        stage=min(zero.stage, 1),
        critic_stage=None if zero.critic_stage is None else min(zero.critic_stage, 1),
        reference_stage=None,
        reward_stage=None,
        offload_optimizer=False,
        offload_parameters=False,
        offload_reference=False,
        offload_reward=False,
        offload_ema=False,
        nvme_path=None,
        quantize_weights=False,
        quantize_gradients=False,
        quantize_frozen_weights=False,
        hpz_partition_size=1,
        sequence_parallel_size=1,
        extra={},
    )
