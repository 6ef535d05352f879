"""Rules for the layers that actor, critic and reference share."""

from __future__ import annotations

from collections.abc import Container

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import AdvantageEstimator, Phase
from rlhf.config.schema.model import refuse_compile
from rlhf.config.schema.run import RunConfig


def check_trunk(config: RunConfig) -> None:
    """Check that a shared trunk has a critic and trained layers, and trains both in each step."""
    ppo = config.ppo
    if ppo.shared_trunk:
        refuse_compile(config, "ppo.shared_trunk=true, which copies layers")
    if Phase.ppo not in config.phase.order or not ppo.shared_trunk:
        return
    broken = {
        f"ppo.shared_trunk=true: ppo.advantage_estimator={ppo.advantage_estimator} has no critic; "
        "remove ppo.shared_trunk, or use ppo.advantage_estimator=gae": (
            ppo.advantage_estimator is not AdvantageEstimator.gae
        ),
        "ppo.num_layers_unfrozen=null: ppo.shared_trunk=true requires the number of top layers to "
        "train; use e.g. ppo.num_layers_unfrozen=2, as in trlx": ppo.num_layers_unfrozen is None,
        f"ppo.actor_freeze_steps={ppo.actor_freeze_steps}: actor and critic of a shared trunk take "
        "one step together; set ppo.actor_freeze_steps=0, or ppo.shared_trunk=false": (
            ppo.actor_freeze_steps > 0
        ),
    }
    refuse_broken_rule(broken)


def check_trunk_layers(config: RunConfig, phases: Container[Phase]) -> None:
    """Raise an error if the policy has too few layers, or its layers' names are unknown."""
    if Phase.ppo not in phases:
        return
    from rlhf.options.trunk.shared_trunk import SharedTrunk  # imports torch
    from rlhf.phases.shared.model_checks import build_weightless_model

    if policy := build_weightless_model("AutoModelForCausalLM", "model", config.model):
        SharedTrunk(
            policy,
            num_layers_unfrozen=config.ppo.num_layers_unfrozen or 0,
            num_value_layers=config.ppo.num_value_layers,
        )
