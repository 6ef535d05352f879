"""Moving reference: the KL penalty pulls towards a reference that follows the policy.

https://arxiv.org/abs/2404.09656, as TRL's sync_ref_model. Every few steps the reference becomes a
mixture of its weights and the policy's. It needs no memory and hardly any time; checkpoints store
the reference too. In half precision the mixture is rounded, so a weight whose distance to the
policy is below 1 / (2 share) units in the last place stays: use a share above 0.5. Use it if the KL
penalty to the initial policy limits the reward too much. Do not use it to hold the policy near the
initial policy: KL and its alarms refer to the moved reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import Phase
from rlhf.config.roles import SHARDED_WEIGHTS, Role, stage_of
from rlhf.config.schema.keys import ABOVE_0_TO_1, AT_LEAST_0, key, needs
from rlhf.methods import Method, MethodKeys
from rlhf_lab.distillation import DistillationKeys

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig
    from rlhf_lab.moving_reference.costs import MovingReferenceCosts
    from rlhf_lab.moving_reference.hooks import MovingReferenceHook


@dataclass(kw_only=True)
class MovingReferenceKeys(MethodKeys):
    """Keys of the group ``ppo`` for the moving reference."""

    reference_every: int = key(AT_LEAST_0, default=0)
    """PPO steps after which the reference of the KL penalty moves towards the policy; 0: never."""
    reference_share: float = key(
        ABOVE_0_TO_1, default=0.6, unread=[needs("reference_every", fix="add {key}=STEPS")]
    )
    """Share of the policy's weights in the moved reference; 1: a copy of the policy."""


class MovingReference(Method):
    """Let the reference of the KL penalty follow the policy."""

    name = "moving_reference"
    keys = {"ppo": MovingReferenceKeys}
    off = {"ppo.reference_every": 0}

    def check(self, config: RunConfig) -> None:
        """Check that the reference has an effect, and can mix the actor's weights into its own."""
        ppo, zero, lora = config.ppo, config.zero, config.lora
        every, teacher = MovingReferenceKeys.of(config).reference_every, DistillationKeys.of(config)
        if every == 0 or Phase.ppo not in config.phase.order:
            return
        stages = {role: stage_of(role, zero) for role in (Role.actor, Role.reference)}
        sharded = [role for role, stage in stages.items() if stage == SHARDED_WEIGHTS]
        broken = {
            f"ppo.teacher_path={teacher.teacher_path}: the reference is the teacher, which must "
            "not become the policy; use ppo.reference_every=0": teacher.teacher_path is not None,
            "ppo.shared_trunk=true: the reference is a frozen branch of the trunk; use "
            "ppo.reference_every=0, or ppo.shared_trunk=false": ppo.shared_trunk,
            "adapters on the actor: the reference has no adapters to update; use "
            "ppo.reference_every=0, or remove actor from lora.roles": (
                lora.rank > 0 and "actor" in lora.roles
            ),
            "rollout.backend=hybrid_engine: DeepSpeed moves the actor's weights into kernels; use "
            "rollout=fast, or ppo.reference_every=0": config.rollout.backend == "hybrid_engine",
            f"zero.stage={zero.stage}: the weights of the {' and the '.join(sharded)} are sharded, "
            "and shards are not mixed; use zero=stage2, and zero.reference_stage=0": bool(sharded),
            f"ppo.kl_ctl={ppo.kl_ctl:g}: nothing pulls the policy towards the reference; use "
            "ppo.kl_ctl=0.1, or ppo.reference_every=0": ppo.kl_ctl == 0 and not teacher.setting,
        }
        refuse_broken_rule(broken, f"ppo.reference_every={every} with ")

    def hook(self) -> type[MovingReferenceHook]:
        """Return the class of the hook that moves the reference."""
        from rlhf_lab.moving_reference.hooks import MovingReferenceHook

        return MovingReferenceHook

    def costs(self) -> MovingReferenceCosts:
        """Return the costs of a reference in each checkpoint."""
        from rlhf_lab.moving_reference.costs import MovingReferenceCosts

        return MovingReferenceCosts()
