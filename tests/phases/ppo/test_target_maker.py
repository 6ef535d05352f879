"""What the updates of ragged rollouts aim at, against the slow reference, over several rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from omegaconf import DictConfig

from rlhf.base.metrics import Metrics, Moments
from rlhf.base.ranks import Ranks
from rlhf.base.types import Rollout
from rlhf.config.freeze import to_run_config
from rlhf.phases.ppo.targets import TargetMaker, Targets
from tests.algorithms import loop_reference as reference
from tests.algorithms.loop_reference import Row, Rows
from tests.phases.ppo.ppo_pieces import kept, some_rollout, targets_of

Compose = Callable[[list[str]], DictConfig]

ROLLOUTS = [some_rollout(seed=seed) for seed in (1, 2, 3)]
FIRST = ROLLOUTS[0]


@pytest.fixture
def make(compose: Compose) -> Callable[..., list[Targets]]:
    """The targets of all rollouts, one after another, under these overrides."""

    def made(*overrides: str, kl_ctl: float = 0.0) -> list[Targets]:
        config = to_run_config(compose(["ppo.missing_end_penalty=0", *overrides])).ppo
        maker = TargetMaker(config, Ranks())
        return [targets_of(maker, rollout, kl_ctl=kl_ctl) for rollout in ROLLOUTS]

    return made


def assert_rows(got_BT: torch.Tensor, expected: Rows) -> None:
    for got, row in zip(kept(got_BT), expected, strict=True):
        assert got == pytest.approx(row, abs=2e-5, rel=2e-5)


def assert_scores(targets: Targets, expected: Row) -> None:
    """With no price on KL the rewards of a response add up to its score."""
    assert targets.rewards_BT.sum(dim=1).tolist() == pytest.approx(expected, abs=1e-5)


def rewards_of(rollout: Rollout, scores: Row, *, kl_ctl: float, estimator: str = "k1") -> Rows:
    old, other = kept(rollout.logprobs_BT), kept(rollout.reference_logprobs_BT)
    kl = reference.kl_per_token(old, other, estimator)
    return reference.token_rewards(kl, scores, kl_ctl=kl_ctl)


FREE = "ppo.clip_reward_value=null"


@pytest.mark.parametrize("shift", [False, True])
def test_running_scaling_has_seen_all_rollouts_so_far(
    make: Callable[..., list[Targets]], *, shift: bool
) -> None:
    made = make("ppo.scale_reward=running", f"ppo.scale_reward_shift={shift}", FREE)
    seen: Row = []
    for rollout, targets in zip(ROLLOUTS, made, strict=True):
        scores = rollout.scores_B.tolist()
        seen += scores
        assert_scores(targets, reference.scale_scores(scores, seen, shift_mean=shift))


@pytest.mark.parametrize("shift", [False, True])
def test_reference_scaling_stays_with_the_first_rollout(
    make: Callable[..., list[Targets]], *, shift: bool
) -> None:
    made = make("ppo.scale_reward=reference", f"ppo.scale_reward_shift={shift}", FREE)
    first = FIRST.scores_B.tolist()
    for rollout, targets in zip(ROLLOUTS, made, strict=True):
        scores = rollout.scores_B.tolist()
        assert_scores(targets, reference.scale_scores(scores, first, shift_mean=shift))


@pytest.mark.slow
@pytest.mark.parametrize(("mean", "std"), [(1.5, 2.0), (None, 2.0), (1.5, None), (0.0, 2.0)])
def test_what_is_given_of_the_reference_takes_the_place_of_the_first_rollouts(
    make: Callable[..., list[Targets]], mean: float | None, std: float | None
) -> None:
    given = ["ppo.scale_reward=reference", "ppo.scale_reward_shift=true", FREE]
    given += [] if mean is None else [f"ppo.reference_score_mean={mean}"]
    given += [] if std is None else [f"ppo.reference_score_std={std}"]
    made = make(*given)
    first = FIRST.scores_B.double()
    centre = first.mean().item() if mean is None else mean
    deviation = first.std(correction=0).item() if std is None else std
    for rollout, targets in zip(ROLLOUTS, made, strict=True):
        assert_scores(targets, [(x - centre) / deviation for x in rollout.scores_B.tolist()])


def test_scores_are_scaled_before_they_are_clipped(make: Callable[..., list[Targets]]) -> None:
    made = make("ppo.scale_reward=reference", "ppo.clip_reward_value=1")
    first = FIRST.scores_B.tolist()
    scaled = reference.scale_scores(first, first, shift_mean=False)
    assert max(map(abs, scaled)) > 1
    assert_scores(made[0], [min(max(x, -1.0), 1.0) for x in scaled])


@pytest.mark.parametrize("clip", ["null", "1"])
def test_a_response_without_an_end_gets_the_score_that_is_given(
    make: Callable[..., list[Targets]], clip: str
) -> None:
    options = ["ppo.missing_end_score=-3", "ppo.missing_end_penalty=7"]
    made = make(f"ppo.clip_reward_value={clip}", *options)
    for rollout, targets in zip(ROLLOUTS, made, strict=True):
        limit = None if clip == "null" else 1.0
        scores, ended = rollout.scores_B.tolist(), rollout.responses.ended_B.tolist()
        expected = reference.clip_scores(scores, ended, limit=limit, penalty=7, instead=-3.0)
        assert expected[1] == -3.0
        assert_scores(targets, expected)


def test_kl_that_is_in_the_loss_costs_no_reward(make: Callable[..., list[Targets]]) -> None:
    placed = ["ppo.kl_placement=loss", "ppo.kl_estimator=k3", FREE]
    made = make(*placed, kl_ctl=0.5)
    for rollout, targets in zip(ROLLOUTS, made, strict=True):
        assert_rows(targets.rewards_BT, rewards_of(rollout, rollout.scores_B.tolist(), kl_ctl=0.0))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_price_of_kl(make: Callable[..., list[Targets]], estimator: str) -> None:
    made = make(f"ppo.kl_estimator={estimator}", FREE, kl_ctl=0.5)
    for rollout, targets in zip(ROLLOUTS, made, strict=True):
        scores = rollout.scores_B.tolist()
        assert_rows(
            targets.rewards_BT, rewards_of(rollout, scores, kl_ctl=0.5, estimator=estimator)
        )


@pytest.mark.slow
@pytest.mark.parametrize("whitens", [False, True])
@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_groups_are_compared(
    make: Callable[..., list[Targets]], estimator: str, *, whitens: bool
) -> None:
    options = [f"ppo.advantage_estimator={estimator}", "ppo.responses_per_prompt=2", FREE]
    made = make(*options, f"ppo.whiten_advantages={whitens}", kl_ctl=0.5)
    for rollout, targets in zip(ROLLOUTS, made, strict=True):
        rewards = rewards_of(rollout, rollout.scores_B.tolist(), kl_ctl=0.5)
        raw = reference.group_advantages(rewards, group_size=2, leaves_one_out=estimator == "rloo")
        assert_rows(targets.raw.advantages_BT, raw)
        used = reference.whiten(raw, shift_mean=True) if whitens else raw
        assert_rows(targets.advantages.advantages_BT, used)


@pytest.mark.parametrize("whitens_rewards", [False, True])
def test_reinforce_pp_takes_discounted_rewards_to_go(
    make: Callable[..., list[Targets]], *, whitens_rewards: bool
) -> None:
    options = ["ppo.advantage_estimator=reinforce_pp", "ppo.gamma=0.8", FREE]
    made = make(*options, f"ppo.whiten_rewards={whitens_rewards}", kl_ctl=0.5)
    for rollout, targets in zip(ROLLOUTS, made, strict=True):
        rewards = rewards_of(rollout, rollout.scores_B.tolist(), kl_ctl=0.5)
        assert_rows(targets.rewards_BT, rewards)
        shaped = reference.whiten(rewards, shift_mean=False) if whitens_rewards else rewards
        raw = reference.rewards_to_go(shaped, gamma=0.8)
        assert_rows(targets.raw.advantages_BT, raw)
        assert_rows(targets.advantages.advantages_BT, reference.whiten(raw, shift_mean=True))


def test_moments_are_those_of_all_ranks(compose: Compose) -> None:
    class WithAnother(Ranks):
        """The other rank has seen the scores 10 and 14."""

        def reduce_metrics(self, metrics: Metrics) -> Metrics:
            theirs = Moments.of(torch.tensor([10.0, 14.0]))
            return {name: metric + theirs for name, metric in metrics.items()}

    options = ["ppo.scale_reward=running", "ppo.whiten_advantages=false", FREE]
    options += ["ppo.missing_end_penalty=0"]
    config = to_run_config(compose(options)).ppo
    targets = targets_of(TargetMaker(config, WithAnother()), FIRST, kl_ctl=0.0)
    scores = FIRST.scores_B.tolist()
    seen = [*scores, 10.0, 14.0]
    assert_scores(targets, reference.scale_scores(scores, seen, shift_mean=False))
    assert math.isfinite(targets.raw.returns_BT.sum().item())


@pytest.mark.parametrize("scaling", ["running", "reference"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("first", [False, True])
def test_a_score_that_is_not_finite_is_left_out_of_the_moments(
    compose: Compose, scaling: str, bad: float, *, first: bool
) -> None:
    scores_B = FIRST.scores_B.clone()
    scores_B[0] = bad
    spoiled = FIRST._replace(scores_B=scores_B)
    others = [spoiled, *ROLLOUTS[1:]] if first else [ROLLOUTS[1], spoiled, ROLLOUTS[2]]
    options = [f"ppo.scale_reward={scaling}", "ppo.scale_reward_shift=true", FREE]
    config = to_run_config(compose(["ppo.missing_end_penalty=0", *options])).ppo
    maker = TargetMaker(config, Ranks())
    *_, last = (targets_of(maker, rollout, kl_ctl=0.0) for rollout in others)
    seen = others if scaling == "running" else others[:1]
    finite = [x for each in seen for x in each.scores_B.tolist() if math.isfinite(x)]
    expected = reference.scale_scores(ROLLOUTS[2].scores_B.tolist(), finite, shift_mean=True)
    assert_scores(last, expected)


@pytest.mark.parametrize("scaling", ["running", "reference"])
def test_a_rollout_without_a_finite_score_sets_no_scale(compose: Compose, scaling: str) -> None:
    nothing = FIRST._replace(scores_B=torch.full_like(FIRST.scores_B, math.nan))
    options = [f"ppo.scale_reward={scaling}", FREE, "ppo.missing_end_penalty=0"]
    maker = TargetMaker(to_run_config(compose(options)).ppo, Ranks())
    targets_of(maker, nothing, kl_ctl=0.0)
    scores = FIRST.scores_B.tolist()
    expected = reference.scale_scores(scores, scores, shift_mean=False)
    assert_scores(targets_of(maker, FIRST, kl_ctl=0.0), expected)
