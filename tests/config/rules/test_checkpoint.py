"""What is best, and when it is measured."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from rlhf.base.errors import ConfigError
from rlhf.config.freeze import to_run_config

BEST = "checkpoint.best=ppo/eval_score"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpoint.load_best=true"], "checkpoint.load_best=true: no metric says what is best"),
        (["checkpoint.patience=3"], "checkpoint.patience=3: no metric says what is best; add"),
        (["checkpoint.best=ppo/score_mean"], "must be a held-out metric PHASE/eval_NAME of sft,"),
        (["checkpoint.best=dpo/eval_loss"], "checkpoint.best=dpo/eval_loss: must be a held-out"),
        (
            [BEST, "ppo.eval_every=0"],
            "with ppo.eval_every=0: the metric is measured only at the end; set",
        ),
        (
            ["zero=stage3_nvme", "checkpoint.every_steps=5"],
            "checkpoint.every_steps=5 with zero.nvme_path=/local_nvme: a checkpoint inside",
        ),
        (["checkpoint.every_minutes=0"], "checkpoint.every_minutes=0.0: must be above 0"),
    ],
)
def test_mistake_is_refused(
    overrides: list[str], message: str, compose: Callable[[list[str]], DictConfig]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        to_run_config(compose(overrides))


def test_measured_metric_is_accepted(compose: Callable[[list[str]], DictConfig]) -> None:
    to_run_config(compose([BEST, "ppo.eval_every=2", "checkpoint.patience=3"]))
