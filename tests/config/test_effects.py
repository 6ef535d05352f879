"""What the schema declares of each key holds: for the store of phases, resume and from_run."""

from dataclasses import replace
from fnmatch import fnmatch
from operator import attrgetter
from typing import Any

import pytest

from rlhf.config.choices import Phase
from rlhf.config.effects import effect_of, effects_by_key
from rlhf.config.schema.keys import AtResume
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import to_run_config
from rlhf.options.phase_store.phase_store import phase_key
from tests.conftest import Compose
from tests.needs_lab import needs_lab

ORDERS = ([Phase.sft, Phase.reward, Phase.ppo], [Phase.sft, Phase.dpo], [Phase.ppo])
# The phase of checkpoint.best is the first, the last, the only one, one that is left out, or none.
BEST = [(order, "sft/eval_loss") for order in ORDERS]
BEST += [(order, "ppo/eval_score") for order in ORDERS[::2]] + [(ORDERS[0], None)]
# Each takes a reason: a run of tests/runtime/test_effects.py, or a look at what reads it.
NO_EFFECT = """
alarms.* checkpoint.* data.cache_dir environment.max_failures environment.processes
experiment from_run hardware.batch_size hardware.*_gb
hardware.*_gib hardware.*_tflops hardware.keep_freed_memory hardware.name hardware.price_per_hour
hardware.training_share
launcher.* model.learning_rates.* name phase.order plan resume reuse.* reward_model.learning_rates.*
rollout.server.* run_dir tracking.* trust_run ppo.critic_check.*
ppo.log_rollouts_every
"""


def other(value: Any) -> Any:
    """Return another value, of any type where ``value`` is null."""
    if isinstance(value, bool):
        return not value
    for kind, more in ((int | float, 1), (str, "x"), (list, ["x"])):
        if isinstance(value, kind):
            return value + more
    return "x" if value is None else {**value, "x": 1}


def changed(config: Any, key: str, value: Any) -> Any:
    """Return ``config`` with another value of a dotted key."""
    name, _, rest = key.partition(".")
    inner = changed(getattr(config, name), rest, value) if rest else value
    return replace(config, **{name: inner})


def keys_of(config: RunConfig) -> dict[Phase, str]:
    return {phase: phase_key(config, phase, data="d", code="c") for phase in config.phase.order}


def says(config: RunConfig, key: str, phase: Phase) -> bool:
    """Return True if the schema says that ``key`` changes the result of ``phase``."""
    so_far = config.phase.order[: config.phase.order.index(phase) + 1]
    return bool(effect_of(key).affects(config) & set(so_far))


@pytest.mark.parametrize(("order", "best"), BEST)
def test_a_phase_has_another_key_exactly_if_the_schema_says_so(
    order: list[Phase], best: str | None, compose: Compose
) -> None:
    config = to_run_config(compose(["experiment=smoke"]))
    config = changed(changed(config, "phase.order", order), "checkpoint.best", best)
    before = keys_of(config)
    for key in effects_by_key().keys() - {"phase.order"}:
        flipped = changed(config, key, other(attrgetter(key)(config)))
        after = keys_of(flipped)
        for phase in order:
            expected = says(config, key, phase) or says(flipped, key, phase)
            assert (after[phase] != before[phase]) is expected, f"{key} and {phase}"


def test_a_phase_depends_on_the_phases_before_it_only(compose: Compose) -> None:
    config = to_run_config(compose([]))
    whole, sft, reward = (
        keys_of(changed(config, "phase.order", order))
        for order in (ORDERS[0], [Phase.sft], [Phase.reward])
    )
    assert whole[Phase.sft] == sft[Phase.sft]
    assert whole[Phase.reward] != reward[Phase.reward]


@needs_lab
def test_only_keys_of_this_list_change_no_result(compose: Compose) -> None:
    config = to_run_config(compose([]))
    found = {key for key, effect in effects_by_key().items() if not effect.affects(config)}
    patterns = NO_EFFECT.split()
    assert {key for key in found if not any(fnmatch(key, each) for each in patterns)} == set()
    for each in patterns:
        assert any(fnmatch(key, each) for key in found), f"{each} is out of date"


def test_a_resumed_run_may_change_no_key_that_changes_more_than_rounding() -> None:
    free = {key for key, effect in effects_by_key().items() if effect.at_resume is AtResume.free}
    assert {"tracking.wandb", "launcher.master_port", "checkpoint.keep", "plan"} <= free
    assert {key for key in free if effect_of(key).affects is not effect_of("name").affects} == set()


def test_a_finished_run_determines_what_its_phases_read(compose: Compose) -> None:
    """All but the precision, the ranks, adapters and kernels, which each run chooses for itself."""
    config = to_run_config(compose([]))
    own = ("hardware", "zero", "lora", "rollout", "fused_layers", "seed")
    for key, effect in effects_by_key().items():
        if effect.affects(config) & {Phase.sft, Phase.reward}:
            assert effect.is_inherited or key.startswith(own), key


def test_a_key_below_a_mapping_has_the_effect_of_the_mapping() -> None:
    assert effect_of("model.architecture.hidden_size") is effect_of("model.architecture")
    assert effect_of("rewards.length.weight") is effect_of("rewards")
    with pytest.raises(KeyError, match=r"no\.such"):
        effect_of("no.such")
