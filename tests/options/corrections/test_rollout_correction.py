"""Weights of a rollout that another policy sampled, in a whole PPO step."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from rlhf.base.ranks import Ranks
from rlhf.options.corrections.rollout_logprobs import (
    correction_metrics,
    step_weights,
    with_proximal_share,
)
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.step_metrics import step_values_to_log
from tests.phases.ppo.ppo_pieces import some_rollout
from tests.phases.ppo.test_logprob_reuse import trainer_of

Compose = Callable[[list[str]], DictConfig]
ERROR = 0.3  # nats by which the sampler is above and below the policy, in turn


def metrics_of(trainer: PPOTrainer) -> dict[str, float]:
    return trainer.train_rlhf(trainer.generate_experience(some_rollout().prompts)).metrics


def test_a_step_weighs_by_the_policy_at_its_start(compose: Compose) -> None:
    keys = ["ppo.rollout_correction=token", "ppo.rollout_correction_mode=mask"]
    keys += ["ppo.rollout_correction_cap=1.2", "ppo.ppo_epochs=1"]
    found = metrics_of(trainer_of(compose, "auto", *keys, error=ERROR))
    kept, rejected = math.exp(-ERROR), 7 / 13  # of 13 tokens the first, third ... weigh more
    assert found["ppo/rollout_weight"] == pytest.approx(kept * (1 - rejected), abs=1e-4)
    assert found["ppo/rollout_limited_share"] == pytest.approx(rejected)
    assert found["ppo/rollout_sample_size"] == pytest.approx(1 - rejected, abs=1e-4)
    assert found["ppo/rollout_weight_min"] == 0.0
    assert found["ppo/ratio_mean"] == pytest.approx(1.0, abs=1e-5), "around the step's start"


def test_nothing_left_is_a_sample_size_of_0(compose: Compose) -> None:
    trainer = trainer_of(
        compose,
        "auto",
        "ppo.rollout_correction=token",
        "ppo.rollout_correction_mode=mask",
        "ppo.rollout_correction_floor=0.9",
    )
    rollout = some_rollout()
    far_BT = rollout.logprobs_BT + 5
    rollout = rollout._replace(responses=rollout.responses._replace(logprobs_BT=far_BT))
    weights = step_weights(trainer.config, rollout, seed=1, rank=0)
    assert weights is not None
    found = step_values_to_log(correction_metrics(weights, rollout.responses.keep_BT), [])
    assert found["ppo/rollout_sample_size"] == found["ppo/rollout_weight"] == 0.0


def test_the_share_of_the_sampler_is_one_by_its_age(compose: Compose) -> None:
    keys = ["ppo.rollout_correction=token", "ppo.proximal_policy=interpolated"]
    trainer = trainer_of(compose, "auto", *keys)
    ages = [with_proximal_share(trainer.config, lag=3, steps_done=step) for step in range(6)]
    assert [each.proximal_share for each in ages] == [1, 1, 1 / 2, 1 / 3, 1 / 3, 1 / 3]
    given = trainer_of(compose, "auto", *keys, "ppo.proximal_share=0.7").config
    assert with_proximal_share(given, lag=3, steps_done=9).proximal_share == 0.7


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_an_interpolated_policy_shares_the_distance(compose: Compose, share: float) -> None:
    """Of the distance d to the sampler, share * d is in the ratio, and the rest in the weight."""
    keys = ["ppo.rollout_correction=token", "ppo.proximal_policy=interpolated"]
    keys += [f"ppo.proximal_share={share}", "ppo.ppo_epochs=1"]
    trainer = trainer_of(compose, "auto", *keys, error=ERROR)
    found = metrics_of(trainer)  # of one update

    def mean(distance: float) -> float:
        return (7 * math.exp(distance) + 6 * math.exp(-distance)) / 13

    assert found["ppo/ratio_mean"] == pytest.approx(mean(share * ERROR), abs=1e-4)
    assert found["ppo/rollout_weight"] == pytest.approx(mean((1 - share) * ERROR), abs=1e-4)
    assert found["ppo/logprob_mismatch"] == pytest.approx(ERROR, abs=1e-4)
    rollout = trainer.generate_experience(some_rollout().prompts)
    assert step_weights(trainer.config, rollout, seed=1, rank=Ranks().rank) is None
