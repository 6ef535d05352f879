"""Rules for ``reward``: each refusal names the key, its value and a way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from rlhf.base.errors import ConfigError
from rlhf.config.freeze import to_run_config
from rlhf.config.roles import reward_key_by_column

Compose = Callable[[list[str]], DictConfig]

LOCAL = ["data=local", "data.path=x.jsonl"]
SCORES = "reward.score_columns=[score_chosen,score_rejected]"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["reward.loss=regression", *LOCAL], ["reward.score_columns=None", "needs two columns"]),
        ([SCORES, *LOCAL], ["only reward.loss=regression reads them"]),
        (
            ["reward.loss=regression", SCORES, "reward.label_smoothing=0.1", *LOCAL],
            ["reward.label_smoothing=0.1", "a squared error has none"],
        ),
        (
            ["reward.loss=regression", SCORES, "reward.label_noise=0.1", *LOCAL],
            ["reward.label_noise=0.1", "reads scores"],
        ),
        (["reward.label_noise=1.5"], ["reward.label_noise=1.5", "from 0 to 1"]),
        (["reward.margin_column=margin"], ["reward.margin_column", "no column margin"]),
        (["reward.label_smoothing=0.5"], ["reward.label_smoothing=0.5", "below 0.5"]),
    ],
)
def test_what_does_not_combine_is_refused(
    overrides: list[str], parts: list[str], compose: Compose
) -> None:
    with pytest.raises(ConfigError) as caught:
        to_run_config(compose(overrides))
    for part in parts:
        assert part in str(caught.value)


def test_the_reward_phase_keeps_the_columns_that_its_loss_reads(compose: Compose) -> None:
    config = to_run_config(compose(["reward.margin_column=margin", *LOCAL]))
    assert reward_key_by_column(config) == {"margin": "reward.margin_column"}
    config = to_run_config(compose(["reward.loss=regression", SCORES, *LOCAL]))
    assert set(reward_key_by_column(config)) == {"score_chosen", "score_rejected"}
