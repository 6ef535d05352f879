"""Whether a run can be resumed with more PPO steps, and equal a run that began with them."""

from __future__ import annotations

from rlhf.base.errors import ConfigError, refuse_broken_rule
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig

STEPS = "ppo.steps"


def adds_steps(frozen: RunConfig, steps: object, *, run: str) -> bool:
    """Return True if ``steps`` are more than the PPO steps with which ``run`` was started.

    Raises:
        ConfigError: if ``steps`` are fewer, or steps that the run has taken would differ in a run
            that began with more.
    """
    ppo = frozen.ppo
    if Phase.ppo not in frozen.phase.order or ppo.steps is None or not isinstance(steps, int):
        return False
    if steps < ppo.steps:
        raise ConfigError(
            f"{STEPS}={steps}: a resumed run only continues, and was started with {STEPS}="
            f"{ppo.steps}; give more than {ppo.steps}, or start a new run with from_run={run}"
        )
    if steps == ppo.steps:
        return False
    schedules = {
        "ppo.lr_schedule": ppo.lr_schedule,
        "ppo.critic_lr_schedule": ppo.critic_lr_schedule,
    }
    depends = "the steps so far depend on the old number of steps"
    fix = f"start a new run from the policy: model=pretrained model.path={run}/ppo/actor"
    refuse_broken_rule(
        {
            **{
                f"{key}={name}: {depends}; {fix}": name in ("linear", "cosine")
                for key, name in schedules.items()
            },
            f"ppo.epochs={ppo.epochs} may end PPO earlier; {fix}": ppo.epochs is not None,
            f"rollout.lag={frozen.rollout.lag}: {depends}; {fix}": frozen.rollout.lag > 0,
        },
        f"resume={run} {STEPS}={steps} (the run was started with {STEPS}={ppo.steps}): ",
    )
    return True
