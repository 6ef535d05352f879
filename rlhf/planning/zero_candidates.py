"""List the ZeRO settings among which a plan with zero=auto chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Device, Dtype, Phase
from rlhf.config.machine_rates import Machine
from rlhf.config.roles import SHARDED_WEIGHTS
from rlhf.config.rules.rollout import check_rollout
from rlhf.config.rules.zero import check_training_engine, check_zero
from rlhf.config.schema.keys import ANSWERING_PHASES
from rlhf.config.schema.run import RunConfig


def zero_candidates(config: RunConfig, machine: Machine) -> list[RunConfig]:
    """Return ``config`` under every valid ZeRO setting, or unchanged without zero.auto.

    Raises:
        ConfigError: if no setting is valid; it is the refusal of the simplest one.
    """
    if not config.zero.auto:
        return [config]
    found: list[RunConfig] = []
    refusals: list[ConfigError] = []
    has_ppo = Phase.ppo in config.phase.order
    has_ema = has_ppo and bool(config.ppo.ema_beta)
    # On a CPU nothing can be offloaded, because the ranks' memory is the host's memory.
    can_offload = config.hardware.device is Device.cuda
    for changes in _zero_settings(has_ppo=has_ppo, has_ema=has_ema, can_offload=can_offload):
        candidate = replace(config, zero=replace(config.zero, auto=False, **changes))
        zero = candidate.zero
        if machine.dtype is Dtype.fp16 and 0 in (zero.stage, zero.critic_stage):
            continue
        try:
            check_zero(candidate)
            check_training_engine(candidate)
            if ANSWERING_PHASES(candidate) & set(candidate.phase.order):
                check_rollout(candidate)
        except ConfigError as error:
            refusals.append(error)
        else:
            found.append(candidate)
    if not found:
        raise refusals[0]
    return found


def _zero_settings(*, has_ppo: bool, has_ema: bool, can_offload: bool) -> Iterator[dict[str, Any]]:
    """Yield combinations of ZeRO stages and offloading options, the simplest first."""
    no = (False,)
    either = (False, True) if can_offload else no
    for stage, critic_stage in product((1, 2, 3, 0), (None, 1, 2, 3, 0) if has_ppo else (None,)):
        if stage == critic_stage:
            continue
        own = stage if critic_stage is None else critic_stage
        shards = stage == SHARDED_WEIGHTS
        yield from (
            {
                "stage": stage,
                "critic_stage": critic_stage,
                "offload_optimizer": optimizer,
                "offload_parameters": parameters,
                "offload_reference": reference,
                "offload_reward": reward,
                "offload_ema": ema,
            }
            for optimizer, parameters, reference, reward, ema in product(
                either if stage else no,
                either if shards else no,
                either if shards else no,
                either if has_ppo and own == SHARDED_WEIGHTS else no,
                either if has_ema else no,
            )
        )
