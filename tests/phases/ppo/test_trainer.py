"""PPOTrainer puts PPO's pieces together as the slow, loop-written reference does."""

import math
from typing import Any

import pytest
import torch

from rlhf.base.errors import ConfigError
from rlhf.base.metrics import Mean, Metrics
from rlhf.base.ranks import Ranks
from rlhf.base.types import LogprobOptions, Rollout
from rlhf.config.batches import BatchPlan
from rlhf.config.freeze import to_run_config
from rlhf.options import PpoConfig
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.step_metrics import num_optimizer_steps
from rlhf.phases.shared.scoring import (
    WholeSequences,
    response_logprobs,
    response_values,
    score_responses,
)
from tests.algorithms import loop_reference as reference
from tests.conftest import Compose
from tests.phases.ppo.ppo_pieces import (
    LENGTHS,
    MICRO,
    ROWS,
    TEMPERATURE,
    kept,
    separate_engine,
    some_rollout,
)


@pytest.fixture
def engine() -> Any:
    return separate_engine()


@pytest.fixture
def rollout() -> Rollout:
    return some_rollout()


def config_of(compose: Compose, *overrides: str) -> PpoConfig:
    return to_run_config(compose(["ppo.ppo_epochs=1", *overrides])).ppo


def own_rollout(engine: Any, rollout: Rollout) -> Rollout:
    """The same responses, as the engine's own models see them."""
    prompts, responses = rollout.prompts, rollout.responses
    return score_responses(engine.models, prompts, responses, micro_batch_size=MICRO)


def mean(rows: list[list[float]]) -> float:
    values = [x for row in rows for x in row]
    return math.fsum(values) / len(values)


@pytest.mark.parametrize("whitens_rewards", [False, True])
def test_a_step_agrees_with_the_reference(
    engine: Any, rollout: Rollout, compose: Compose, *, whitens_rewards: bool
) -> None:
    overrides = ["ppo.kl_ctl=0.3", "ppo.kl_estimator=k3", "ppo.gamma=0.9"]
    target = 0.9 * kl_to_reference(rollout)  # near enough that the controller does not clip
    overrides += [f"ppo.kl_target={target}", "ppo.kl_horizon=100"]
    overrides += [f"ppo.whiten_rewards={whitens_rewards}"]
    overrides += ["ppo.cliprange_high=0.4", "ppo.dual_clip=1.05"]
    config = config_of(compose, *overrides)
    trainer = PPOTrainer(engine, config)
    stats = trainer.train_rlhf(rollout)

    old, other = kept(rollout.logprobs_BT), kept(rollout.reference_logprobs_BT)
    scores = reference.clip_scores(
        rollout.scores_B.tolist(),
        rollout.responses.ended_B.tolist(),
        limit=config.clip_reward_value,
        penalty=config.missing_end_penalty,
    )
    rewards = reference.token_rewards(reference.kl_per_token(old, other, "k3"), scores, kl_ctl=0.3)
    shaped = reference.whiten(rewards, shift_mean=False) if whitens_rewards else rewards
    values = kept(rollout.values_BT)
    advantages, returns = reference.gae(shaped, values, gamma=0.9, lam=config.lam)
    sequences = WholeSequences(rollout.prompts, rollout.responses)
    with torch.no_grad():
        learned = response_logprobs(engine.actor, sequences, LogprobOptions(TEMPERATURE))
        new = kept(learned.logprobs_BT)
        new_values = kept(response_values(engine.critic, sequences))
    actor = reference.policy_loss(
        new,
        old,
        reference.whiten(advantages, shift_mean=True),
        cliprange=config.cliprange,
        cliprange_high=0.4,
        dual_clip=1.05,
    )
    critic = reference.value_loss(new_values, values, returns, cliprange=config.cliprange_value)
    kl = [math.fsum(row) for row in reference.kl_per_token(old, other, "k1")]
    pairs = zip(returns, values, strict=True)
    errors = [[r - v for r, v in zip(*rows, strict=True)] for rows in pairs]
    expected = {
        "ppo/actor_loss": actor.mean,
        "ppo/clipfrac": actor.clipfrac,
        "ppo/dual_clipfrac": actor.dual_clipfrac,
        "ppo/approx_kl": actor.approx_kl,
        "ppo/ratio_max": actor.ratio_max,
        "ppo/ratio_mean": actor.ratio_mean,
        "ppo/entropy": mean(kept(learned.entropy_BT)),
        "ppo/critic_loss": critic.mean,
        "ppo/value_clipfrac": critic.clipfrac,
        "ppo/kl_to_reference": math.fsum(kl) / ROWS,
        "ppo/kl_to_reference_k3": mean_of_sums(reference.kl_per_token(old, other, "k3")),
        "ppo/kl_per_token": math.fsum(kl) / sum(LENGTHS),
        "ppo/reward_mean": mean_of_sums(rewards),
        "ppo/advantages_mean": mean(advantages),
        "ppo/returns_mean": mean(returns),
        "ppo/returns_min": min(map(min, returns)),
        "ppo/returns_max": max(map(max, returns)),
        "ppo/values_min": min(map(min, values)),
        "ppo/values_max": max(map(max, values)),
        "ppo/value_error": mean([[error**2 for error in row] for row in errors]),
        "ppo/explained_variance": 1 - variance(errors) / variance(returns),
        "ppo/response_tokens": sum(LENGTHS) / ROWS,
        "ppo/ended_share": 0.75,
        "ppo/same_response_share": 0.0,
        "ppo/kl_ctl": 0.3,
        "ppo/actor_grad_norm": 2.0,
        "ppo/critic_learning_rate": 0.5,
        "ppo/updates": 1,
        "ppo/skipped_steps": 0,
    }
    got = {name: stats.metrics[name] for name in expected}
    assert got == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert actor.dual_clipfrac > 0
    for model in (engine.actor, engine.critic):
        assert all(each.isfinite().all() for each in model.gradients[0].values())
    steered = reference.controlled_kl_ctl(
        0.3, math.fsum(kl) / ROWS, target=target, horizon=100, num_sequences=ROWS
    )
    assert trainer.kl.coefficient == pytest.approx(steered, rel=1e-6)
    error = 100 / ROWS * (trainer.kl.coefficient / 0.3 - 1)
    assert error == pytest.approx(1 / 0.9 - 1, rel=1e-5), "not clipped at 0.2"


def kl_to_reference(rollout: Rollout) -> float:
    """The mean KL per sequence (k1)."""
    sides = (kept(rollout.logprobs_BT), kept(rollout.reference_logprobs_BT))
    return mean_of_sums(reference.kl_per_token(*sides, "k1"))


def mean_of_sums(rows: list[list[float]]) -> float:
    return math.fsum(math.fsum(row) for row in rows) / len(rows)


def variance(rows: list[list[float]]) -> float:
    centre = mean(rows)
    return mean([[(x - centre) ** 2 for x in row] for row in rows])


def test_micro_batches_of_an_update_are_of_like_length(
    engine: Any, rollout: Rollout, compose: Compose
) -> None:
    widths: list[int] = []
    engine.actor.module.register_forward_hook(
        lambda _, args, __: widths.append(args[0].shape[1]), prepend=True
    )
    PPOTrainer(engine, config_of(compose, "ppo.ppo_epochs=8")).train_rlhf(rollout)
    # whole sequences of 2 + 3, 4 + 5, 3 + 1 and 1 + 4 tokens: 9 with 5, 5 with 4
    assert widths == [9, 5] * 8


def test_a_rollout_must_divide_into_mini_batches(
    engine: Any, rollout: Rollout, compose: Compose
) -> None:
    engine.plan = BatchPlan(per_rank=3, micro=3, accumulation=1)
    trainer = PPOTrainer(engine, to_run_config(compose([])).ppo)
    with pytest.raises(ConfigError, match="rollout=4: must be a multiple of"):
        trainer.train_rlhf(rollout)


@pytest.mark.slow
def test_ranks_end_their_updates_together(rollout: Rollout, compose: Compose) -> None:
    class WithRestless(Ranks):
        """The other rank's policy has moved by 3 nats on each of 1000 tokens."""

        def reduce_metrics(self, metrics: Metrics) -> Metrics:
            theirs = Mean(torch.tensor(3000.0), torch.tensor(1000.0))
            key = "ppo/sampler_kl"
            return metrics if key not in metrics else metrics | {key: metrics[key] + theirs}

    engine = separate_engine()
    engine.ranks = WithRestless()
    config = config_of(compose, "ppo.ppo_epochs=4", "ppo.stop_update_kl=1")
    stats = PPOTrainer(engine, config).train_rlhf(own_rollout(engine, rollout))
    assert stats.metrics["ppo/updates"] == 1


@pytest.mark.parametrize(
    ("overflows", "aligned", "discarded", "skipped"),
    [
        ((True, False), True, (False, True), 2),
        ((False, True), True, (True, False), 2),
        ((True, True), True, (False, False), 2),
        ((True, False), False, (False, False), 1),
    ],
)
def test_an_overflow_of_one_skips_the_step_of_both(
    overflows: tuple[bool, bool],
    discarded: tuple[bool, bool],
    skipped: int,
    rollout: Rollout,
    compose: Compose,
    *,
    aligned: bool,
) -> None:
    engine = separate_engine(lr=0.1, overflows=overflows, align_overflow=aligned)
    models = (engine.actor, engine.critic)
    heads = [engine.actor.module.pretrained.lm_head, engine.critic.module.pretrained.score]
    before = [head.weight.clone() for head in heads]
    stats = PPOTrainer(engine, config_of(compose)).train_rlhf(rollout)
    assert tuple(model.discarded[0] for model in models) == discarded
    moved = [not torch.equal(h.weight, w) for h, w in zip(heads, before, strict=True)]
    stays = [o or d for o, d in zip(overflows, discarded, strict=True)]
    assert moved == [not s for s in stays]
    assert stats.metrics["ppo/skipped_steps"] == skipped
    assert num_optimizer_steps(stats.metrics) == 2
    counted = (stats.metrics["ppo/actor_overflows"], stats.metrics["ppo/critic_overflows"])
    assert counted == overflows


def test_without_values_the_policy_learns_alone(rollout: Rollout, compose: Compose) -> None:
    engine = separate_engine(has_critic=False)
    options = ["ppo.advantage_estimator=rloo", "ppo.responses_per_prompt=2"]
    stats = PPOTrainer(engine, config_of(compose, *options)).train_rlhf(rollout)
    assert (len(engine.actor.gradients), engine.critic.micro_steps) == (1, 0)
    assert stats.critic_loss == 0.0
    without = {"critic_loss", "value_clipfrac", "values_mean", "explained_variance"}
    assert not {f"ppo/{name}" for name in without} & stats.metrics.keys()


def test_dropout_is_in_the_updates_and_not_in_the_scoring(
    rollout: Rollout, compose: Compose
) -> None:
    engine = separate_engine(dropout=0.5)
    first, again = own_rollout(engine, rollout), own_rollout(engine, rollout)
    assert torch.equal(first.logprobs_BT, again.logprobs_BT)
    assert torch.equal(first.values_BT, again.values_BT)
    assert engine.actor.module.training
    assert engine.critic.module.training
    torch.manual_seed(0)
    config = config_of(compose, "ppo.cliprange_value=null")
    stats = PPOTrainer(engine, config).train_rlhf(first)
    assert stats.metrics["ppo/approx_kl"] > 1e-3
    still = separate_engine()
    same = own_rollout(still, rollout)
    assert torch.equal(same.logprobs_BT, first.logprobs_BT)
    stats = PPOTrainer(still, config).train_rlhf(same)
    assert stats.metrics["ppo/approx_kl"] == pytest.approx(0, abs=1e-9)
