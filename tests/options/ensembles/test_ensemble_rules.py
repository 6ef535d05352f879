"""Rules for the members of a reward model: each refusal names the key, its value and a way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Phase
from rlhf.config.effects import effect_of, values_that_affect
from rlhf.config.freeze import to_run_config

Compose = Callable[[list[str]], DictConfig]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["reward.members=0"], ["reward.members=0", "above 0"]),
        (
            ["reward.members=5", "model@reward_model=gold", "phase=pipeline_rule"],
            ["reward.members=5", "no reward model"],
        ),
        (
            ["reward.members=5", "lora=all", "model=pretrained", "model.path=x"],
            ["reward.members=5 with adapters", "lora.roles"],
        ),
        (["reward.members=5", "zero=stage3"], ["reward.members=5", "stage 3", "zero=stage2"]),
        (
            ["reward.members=5", "zero=stage2", "zero.reward_stage=3"],
            ["reward.members=5", "stage 3"],
        ),
        (
            ["reward.members=5", "checkpoint.best=reward/eval_accuracy"],
            ["reward.members=5", "checkpoint.best=reward/eval_accuracy", "checkpoint.best=null"],
        ),
    ],
)
def test_members_that_do_not_suit_the_run_are_refused(
    overrides: list[str], parts: list[str], compose: Compose
) -> None:
    with pytest.raises(ConfigError) as caught:
        to_run_config(compose(overrides))
    for part in parts:
        assert part in str(caught.value)


def test_only_averaged_weights_change_the_training(compose: Compose) -> None:
    """Runs that combine the same members in other ways share one reward phase."""

    def read(combine: str) -> dict[str, object]:
        config = to_run_config(compose(["reward.members=5", f"reward.combine={combine}"]))
        return values_that_affect(config, frozenset({Phase.reward}))

    assert read("mean") == read("worst") == read("uncertainty")
    assert read("warm") != read("mean")
    assert not effect_of("reward.combine").is_inherited
