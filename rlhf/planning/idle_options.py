"""Find the ZeRO++ and MixZ++ options that have no effect in a run, or only cost memory."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.config.batches import num_ranks
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.planning.advice import ROLES


def idle_options(config: RunConfig) -> tuple[str, ...]:
    """Return one sentence for every option that saves nothing in this run, with the reason.

    ``zero.quantize_weights`` is never included, because it halves the traffic within a node too.
    """
    return tuple(_idle_sentences(config))


def _idle_sentences(config: RunConfig) -> Iterator[str]:
    zero, ranks = config.zero, num_ranks(config)
    if config.hardware.nodes == 1:
        parts = zero.hpz_partition_size
        key = f"zero.hpz_partition_size={parts} on one node"
        if parts == ranks > 1:
            yield f"{key} has no effect: the {ranks} ranks already hold all weights among them"
        elif parts > 1:
            yield (
                f"{key} only costs memory, 1/{parts} of the weights on every rank: there is no "
                "traffic between nodes to save"
            )
        # Stage 3 of DeepSpeed 0.19.8 (__avg_scatter_grads) quantizes only for two or more nodes.
        if zero.quantize_gradients:
            yield (
                "zero.quantize_gradients=true has no effect on one node: DeepSpeed 0.19.8 "
                "quantizes gradients only if there are several nodes"
            )
    if zero.quantize_frozen_weights and not _trains_partly_frozen_model(config):
        yield (
            f"zero.quantize_frozen_weights=true has no effect: lora.roles="
            f"[{','.join(config.lora.roles)}] names no model that is trained here, so no trained "
            "model has frozen weights"
        )


def _trains_partly_frozen_model(config: RunConfig) -> bool:
    """Return True if a trained model has frozen weights, due to adapters or a shared trunk."""
    order = config.phase.order
    trained = {role for phase in order for role in ROLES[phase]}
    return bool(trained & set(config.lora.roles)) or (
        config.ppo.shared_trunk and Phase.ppo in order
    )
