"""Find errors before the first phase that otherwise a later phase, or the end of the run, raises.

``plan=only`` and the start of a run call ``check_before_start``, and ``require_examples``
(rlhf/data/phase_needs.py) when they have read the data.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from rlhf.base.errors import ConfigError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.choices import Phase, PlanMode, RewardLossName, Source, Unpaired
from rlhf.config.hydra_errors import did_you_mean
from rlhf.config.schema.run import RunConfig
from rlhf.methods import installed_methods
from rlhf.options.environments.keys import FailureName
from rlhf.phases.shared.model_checks import MODEL_CHECKS
from rlhf.rewards.isolated import check_reward_parts
from rlhf.run.metric_table import METRICS, better_direction, metrics_of


def check_before_start(config: RunConfig, *, finished: Container[Phase] = ()) -> None:
    """Raise an error if a phase that is not ``finished`` would fail for a foreseeable reason."""
    if (best := config.checkpoint.best) is not None:
        known = held_out_metric_names(config, Phase(best.partition("/")[0]))
        require_known_name("checkpoint.best", best, known)
        if better_direction(best) is None:
            raise ConfigError(
                f"checkpoint.best={best}: neither a higher nor a lower value is better; choose one "
                f"of {', '.join(name for name in known if better_direction(name))}"
            )
    if config.plan is PlanMode.only:  # a real start checks rewards where the ranks run
        check_reward_parts(config)
    for check in MODEL_CHECKS:
        check(config, [phase for phase in config.phase.order if phase not in finished])


def require_known_name(key: str, name: str, known: Sequence[str]) -> None:
    """Raise ConfigError if ``name``, a value of ``key``, is none of the ``known`` names."""
    if name not in known:
        raise ConfigError(
            f"{key}={name}: this run does not measure it; use one of {', '.join(known)}"
            f"{did_you_mean(name, known)}"
        )


def held_out_metric_names(config: RunConfig, phase: Phase) -> list[str]:
    """Return the names of the metrics that the evaluations within ``phase`` log."""
    # These three metrics are logged only at the end of the phase.
    absent = ["one_item_wrong", "one_item_too_many", "one_item_missing"]
    if config.data.source is not Source.synthetic:
        absent += ["gold", "exact", "exact_greedy", "correct", "polite", "stops"]
    reward = config.reward
    if reward.loss is RewardLossName.regression or reward.unpaired is not None:
        absent.append("calibration_error")
    if reward.unpaired is not None:
        absent.append("prompt_variance")
    if reward.unpaired is Unpaired.scores:
        absent += ["chosen_score", "rejected_score"]
    groups_off = () if config.environment.is_used else ("episode",)
    off = {m for each in installed_methods() if not each.is_on(config) for m in metrics_of(each)}
    names = []
    for metric in METRICS:
        head, _, tail = metric.partition("/eval_")
        is_absent = tail in absent or tail.startswith(groups_off) or metric in off
        if head == phase and tail and not is_absent:
            names += _expand_name_placeholder(metric, config)
    return names


def _expand_name_placeholder(metric: str, config: RunConfig) -> list[str]:
    """Return ``metric``, or for GROUP/NAME the metrics with each member of the group as NAME.

    The members are the rewards, or the failures of an environment, if there is one.
    """
    group = metric.removesuffix("/NAME")
    if group == metric:
        return [metric]
    failures = [*FailureName] if config.environment.is_used else []
    members: dict[str, Sequence[str]] = {"parts": [*config.rewards], "episode/failures": failures}
    names = members.get(group.partition("/")[2].removeprefix("eval_"), [])
    return [f"{group}/{name}" for name in names]


def logged_metric_names(config: RunConfig) -> list[str]:
    """Return the names of the metrics that the phases of a run may log."""
    logged = [m for m in METRICS if "/eval_" not in m and m.partition("/")[0] in config.phase.order]
    names = [name for metric in logged for name in _expand_name_placeholder(metric, config)]
    return names + [m for phase in config.phase.order for m in held_out_metric_names(config, phase)]


def result_names(config: RunConfig) -> list[str]:
    """Return the names PHASE.NAME of the numbers in result.json that a search may optimise."""
    names = read_yaml_beside(__file__, "measure_names.yaml")
    answers = [*names["answers"]["always"]]
    if config.data.source is Source.synthetic:
        answers += names["answers"]["synthetic_data"]
    if config.environment.is_used:
        answers += names["answers"]["environment"]
    whens = ["before", "after", *(["after_ema"] if config.ppo.ema_beta > 0 else [])]
    answered = [f"{name}_{when}" for name in answers for when in whens]
    measured = []
    for phase in config.phase.order:
        of_answers = answered if phase in (Phase.dpo, Phase.ppo) else []
        of_phase = [*names["phases"][phase], *of_answers, *names["all_phases"]]
        measured += [f"{phase}.{name}" for name in of_phase]
    return measured
