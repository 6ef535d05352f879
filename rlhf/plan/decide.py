"""Plan a composed configuration, and write the choices of the plan into it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import NamedTuple

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Phase, PlanMode, When
from rlhf.config.roles import SHARDED_WEIGHTS, Role, stage_of
from rlhf.config.schema.run import RunConfig
from rlhf.config.validation import validate
from rlhf.models.model_uses import UnknownModelError
from rlhf.options import Backend
from rlhf.plan.advice import describe_idle_options
from rlhf.plan.plan import Plan, plan_run
from rlhf.plan.steps import Loads


class Decision(NamedTuple):
    """The result of planning: the configuration to run, its plan, and ``notes`` to print.

    The notes name options without effect, and the reason if the run could not be planned.
    """

    config: RunConfig
    plan: Plan | None
    notes: tuple[str, ...] = ()


def plan_and_configure(
    config: RunConfig, loads: Loads | None = None, *, finished: Container[Phase] = ()
) -> Decision:
    """Plan a run without its ``finished`` phases; write the plan's choices into its configuration.

    Raises:
        ConfigError: if plan=check and the run does not fit, if plan=only and a model has an unknown
            shape, or if the resulting configuration is invalid.
    """
    if config.plan is PlanMode.off:
        return Decision(config, None, tuple(describe_idle_options(config)))
    try:
        plan = plan_run(config, loads, finished=finished)
    except UnknownModelError as error:
        if config.plan is PlanMode.only:
            raise ConfigError(
                f"plan=only: {error}; name model and reward_model by their sizes, as in "
                "model=opt_13b, or by a folder with a config.json"
            ) from error
        reason = f"no plan of memory and time: {error}"
        return Decision(config, None, (reason, *describe_idle_options(config)))
    if config.plan is PlanMode.check and not plan.fits:
        ways = "; ".join(plan.fitting_overrides)
        known = f"what fits: {ways}" if ways else "the planner knows no change that fits"
        raise ConfigError(
            f"{plan.misfit_reason}; {known}. plan=only shows the parts, plan=off skips this check"
        )
    config = resolve_auto(plan)
    validate(config)
    return Decision(config, plan, (*plan.warnings, *describe_idle_options(config)))


def resolve_auto(plan: Plan) -> RunConfig:
    """Return the plan's configuration, with the plan's choices instead of ``auto`` and null."""
    config = plan.config
    for phase in plan.phases:
        name = phase.phase.value
        settings = replace(getattr(config, name), micro_batch_size=phase.micro_batch)
        config = replace(config, **{name: settings})
        if phase.phase is not Phase.ppo:
            continue
        rollout = config.rollout
        share = config.ppo.rollout_batch_size // plan.machine.ranks
        if rollout.max_rows is None and phase.rows is not None and phase.rows < share:
            rollout = replace(rollout, max_rows=phase.rows)
        is_sharded = stage_of(Role.actor, plan.config.zero) == SHARDED_WEIGHTS
        is_open = rollout.gather_weights is When.auto and rollout.backend is Backend.fast
        if is_sharded and is_open:
            choice = When.always if phase.gathers else When.never
            rollout = replace(rollout, gather_weights=choice)
        if rollout.keep_graphs is When.auto:
            choice = When.always if phase.keeps_graphs else When.never
            rollout = replace(rollout, keep_graphs=choice)
        config = replace(config, rollout=rollout)
    return config
