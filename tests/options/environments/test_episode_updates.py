"""A PPO step on episodes: what is learned, against loops in float64, and what must not matter."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.base.types import LogprobOptions, Rollout
from rlhf.config.choices import RewardKind
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.rewards import RewardTerm
from rlhf.config.schema.run import RunConfig
from rlhf.options.environments.turns import Turns, Utterance
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.reward_mix import build_reward_mix
from rlhf.phases.shared.scoring import (
    WholeSequences,
    response_logprobs,
    response_values,
    score_responses,
)
from tests.algorithms import loop_reference as reference
from tests.conftest import Compose
from tests.phases.ppo.ppo_pieces import (
    MICRO,
    TEMPERATURE,
    maker_of,
    separate_engine,
    some_rollout,
)

# The turn of each token; -1: an observation, and padding behind the last turn.
TURNS = torch.tensor([[0, 0, 0, -1, -1], [0, 0, -1, 1, 1], [0, -1, -1, -1, -1], [0, -1, 1, 1, -1]])
REWARDS = torch.tensor([[0, 0, 1.5, 0, 0], [0, 0.5, 0, 0, 1], [-1, 0, 0, 0, 0], [0.25, 0, 0, 2, 0]])
CUT = torch.tensor([False, True, False, True])
WEIGHT = 0.8
TERMS = {"game": RewardTerm(kind=RewardKind.environment, weight=WEIGHT)}


def config_of(compose: Compose, *overrides: str) -> RunConfig:
    plain = ["experiment=number_guessing", "ppo.ppo_epochs=1", "ppo.warmup_steps=0"]
    return to_run_config(compose([*plain, *overrides]))


@pytest.fixture
def engine(compose: Compose) -> Any:
    """An engine whose responses are episodes."""
    built, environment = separate_engine(), config_of(compose).environment
    built.config = replace(built.config, environment=environment, rewards=TERMS)
    return built


@pytest.fixture
def rollout(engine: Any) -> Rollout:
    """Episodes as the engine's own models see them; NaN stands in observations."""
    plain = some_rollout()
    turns = Turns(
        plain.responses.keep_BT,
        TURNS,
        REWARDS,
        CUT,
        CUT.float(),
        [[Utterance("assistant", "")]] * 4,
        [[]] * 4,
    )
    extras = turns._asdict()
    responses = plain.responses._replace(keep_BT=TURNS >= 0, ended_B=~CUT, extras=extras)
    scored = score_responses(engine.models, plain.prompts, responses, micro_batch_size=MICRO)
    noise_BT = torch.randn(TURNS.shape, generator=torch.Generator().manual_seed(1))
    mix = build_reward_mix(engine.config, engine.tokenizer)
    scores_B, parts = mix(plain.prompts, responses, torch.zeros(len(TURNS)))
    names = ("logprobs_BT", "reference_logprobs_BT", "values_BT")
    seen = {name: getattr(scored, name).masked_fill(TURNS < 0, torch.nan) for name in names}
    seen["logprobs_BT"] += 0.1 * noise_BT
    return scored._replace(**seen, scores_B=scores_B, parts=parts)


def written(x_BT: Tensor) -> list[list[float]]:
    """The cells that the policy wrote, one list for each row."""
    return [row[turn >= 0].tolist() for row, turn in zip(x_BT, TURNS, strict=True)]


def advantages_of(
    rewards: list[list[float]], rollout: Rollout, *, gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """The loop for tokens, with the critic's value after episodes that were cut."""
    found: tuple[list[list[float]], list[list[float]]] = ([], [])
    last = (rollout.last_values_B * CUT).tolist()
    for row, values in enumerate(written(rollout.values_BT)):
        carried = [*rewards[row][:-1], rewards[row][-1] + gamma * last[row]]
        (advantages,), (returns,) = reference.gae([carried], [values], gamma=gamma, lam=lam)
        found[0].append(advantages)
        found[1].append(returns)
    return found


def test_a_step_agrees_with_loops(engine: Any, rollout: Rollout, compose: Compose) -> None:
    overrides = ["ppo.kl_ctl=0.3", "ppo.gamma=0.9", "ppo.lam=0.8", "ppo.clip_reward_value=1.1"]
    config = config_of(compose, *overrides)
    trainer = PPOTrainer(engine, config.ppo)
    for hook in trainer.hooks:
        rollout = hook.annotate_scored_rollout(trainer, rollout)
    stats = trainer.train_rlhf(rollout)
    old, other = written(rollout.logprobs_BT), written(rollout.reference_logprobs_BT)
    kl = reference.kl_per_token(old, other, "k1")
    given = written((WEIGHT * REWARDS).clamp(-1.1, 1.1))
    rewards = [
        [g - 0.3 * k for g, k in zip(*rows, strict=True)] for rows in zip(given, kl, strict=True)
    ]
    advantages, returns = advantages_of(rewards, rollout, gamma=0.9, lam=0.8)
    sequences = WholeSequences(rollout.prompts, rollout.responses)
    with torch.no_grad():
        options = LogprobOptions(TEMPERATURE)
        new = written(response_logprobs(engine.actor, sequences, options).logprobs_BT)
        values = written(response_values(engine.critic, sequences))
    actor = reference.policy_loss(
        new, old, reference.whiten(advantages, shift_mean=True), cliprange=config.ppo.cliprange
    )
    critic = reference.value_loss(values, written(rollout.values_BT), returns, cliprange=None)
    assert stats.actor_loss == pytest.approx(actor.mean, abs=1e-5)
    assert stats.critic_loss == pytest.approx(critic.mean, abs=1e-5)
    for model in (engine.actor, engine.critic):
        assert all(each.isfinite().all() for each in model.gradients[0].values())
    expected = {
        "ppo/kl_to_reference": math.fsum(map(math.fsum, kl)) / 4,
        "ppo/response_tokens": 11 / 4,
        "ppo/episode/turns": 1.5,
        "ppo/episode/return": float(REWARDS.sum()) / 4,
        "ppo/episode/observation_tokens": 2 / 4,
        "ppo/episode/truncated": 0.5,
        "ppo/reward_mean": math.fsum(map(math.fsum, rewards)) / 4,
    }
    found = {name: stats.metrics[name] for name in expected}
    assert found == pytest.approx(expected, abs=1e-5)


def test_turns_charge_each_token_its_own_kl_once(rollout: Rollout, compose: Compose) -> None:
    config = config_of(compose, "ppo.gae_unit=turn", "ppo.gamma=0.9", "ppo.lam=0.8")
    made = maker_of(config, TERMS).make(rollout, kl_ctl=0.3)
    old, other = written(rollout.logprobs_BT), written(rollout.reference_logprobs_BT)
    kl = reference.kl_per_token(old, other, "k1")
    last = (rollout.last_values_B * CUT).tolist()
    for row, turn_T in enumerate(TURNS):
        own = [turn_T == turn for turn in range(int(turn_T.max()) + 1)]
        rewards = [WEIGHT * float(REWARDS[row][own_T].sum()) for own_T in own]
        rewards[-1] += 0.9 * last[row]
        values = [float(rollout.values_BT[row][own_T][0]) for own_T in own]
        (advantages,), (returns,) = reference.gae([rewards], [values], gamma=0.9, lam=0.8)
        turns = [turn for turn in turn_T.tolist() if turn >= 0]
        expected = [advantages[turn] - 0.3 * k for turn, k in zip(turns, kl[row], strict=True)]
        assert written(made.raw.advantages_BT)[row] == pytest.approx(expected, abs=1e-5)
        expected = [returns[turn] for turn in turns]
        assert written(made.raw.returns_BT)[row] == pytest.approx(expected, abs=1e-5)


def test_an_episode_alone_is_scored_as_one_sequence(engine: Any, rollout: Rollout) -> None:
    """Log-probabilities and values of turns behind an observation are those of the whole text."""
    prompts, responses = rollout.prompts, rollout.responses
    for row, turn_T in enumerate(TURNS):
        prompt = prompts.ids_BP[row][prompts.attend_BP[row]]
        text = responses.ids_BT[row][responses.attend_BT[row]]
        ids = torch.cat([prompt, text])[None]
        with torch.no_grad():
            logits_SV = engine.actor.module.pretrained(ids).logits[0] / TEMPERATURE
            values_S = engine.critic(ids)[0]
        places = torch.arange(len(text))[turn_T[: len(text)] >= 0] + len(prompt)
        expected = logits_SV.log_softmax(-1)[places - 1].gather(1, ids[0, places, None])[:, 0]
        scored = score_responses(engine.models, prompts, responses, micro_batch_size=MICRO)
        torch.testing.assert_close(scored.logprobs_BT[row][turn_T >= 0], expected)
        torch.testing.assert_close(scored.values_BT[row][turn_T >= 0], values_S[places - 1])
        torch.testing.assert_close(scored.last_values_B[row], values_S[-1])
