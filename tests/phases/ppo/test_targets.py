"""From a rollout to what its updates aim at, as the keys of ppo ask."""

import json
import math
from collections.abc import Callable

import pytest
import torch

from rlhf.base.metrics import Metrics, Moments
from rlhf.base.ranks import Ranks
from rlhf.base.types import PromptBatch, Responses, Rollout, TermScores
from rlhf.config.choices import RewardKind
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.rewards import RewardTerm
from rlhf.phases.ppo.targets import TargetMaker, Targets
from tests.algorithms import loop_reference
from tests.algorithms.padded_batches import assert_close, keep_of, normal, with_garbage
from tests.conftest import Compose
from tests.phases.ppo.ppo_pieces import targets_of

Of = Callable[..., Targets]  # scores -> targets
With = Callable[..., Of]  # overrides -> targets of scores

# The score alone reaches the targets, and nothing bends it.
BARE = ["ppo.kl_ctl=0", "ppo.missing_end_penalty=0", "ppo.clip_reward_value=null"]
BARE += ["ppo.whiten_advantages=false", "ppo.lam=1"]


def rollout_of(*scores: float) -> Rollout:
    """Responses of two tokens, without KL and with values of 0."""
    batch = len(scores)
    nothing_BT = torch.zeros(batch, 2)
    keep_BT = torch.ones(batch, 2, dtype=torch.bool)
    responses = Responses(nothing_BT.long(), keep_BT, keep_BT[:, 0])
    prompts = PromptBatch(nothing_BT.long(), keep_BT, nothing_BT, [""] * batch)
    return Rollout(prompts, responses, nothing_BT, nothing_BT, nothing_BT, torch.tensor(scores))


def maker_of(compose: Compose, *overrides: str, ranks: Ranks | None = None) -> TargetMaker:
    config = to_run_config(compose([*BARE, *overrides])).ppo
    return TargetMaker(config, ranks or Ranks())


@pytest.fixture
def targets(compose: Compose) -> With:
    """Targets of rollouts with these scores, one after another."""

    def made(*overrides: str) -> Of:
        maker = maker_of(compose, *overrides)
        return lambda *scores: targets_of(maker, rollout_of(*scores), kl_ctl=0.0)

    return made


def rewards(targets: Targets) -> list[float]:
    """Rewards of the last tokens."""
    assert not targets.rewards_BT[:, 0].any()
    return targets.rewards_BT[:, 1].tolist()


def test_scaling_follows_the_scores_of_all_rollouts(targets: With) -> None:
    of = targets("ppo.scale_reward=running")
    assert rewards(of(1.0, 3.0)) == pytest.approx([1.0, 3.0], abs=1e-6)  # deviation 1
    # 1, 3, 5, 7: deviation sqrt(5)
    assert rewards(of(5.0, 7.0)) == pytest.approx([5 / 5**0.5, 7 / 5**0.5], abs=1e-6)


def test_scaling_by_the_first_rollout_stays(targets: With) -> None:
    of = targets("ppo.scale_reward=reference", "ppo.scale_reward_shift=true")
    assert rewards(of(2.0, 6.0)) == pytest.approx([-1.0, 1.0], abs=1e-6)  # mean 4, deviation 2
    assert rewards(of(8.0, 4.0)) == pytest.approx([2.0, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        # of 2 and 6: mean 4, deviation 2
        (1, 4, [0.25, 1.25]),
        (0, 4, [0.5, 1.5]),  # zero is given too
        ("null", 4, [-0.5, 0.5]),
        (1, "null", [0.5, 2.5]),
    ],
)
def test_the_reference_can_be_given(
    mean: object, std: object, expected: list[float], targets: With
) -> None:
    given = [f"ppo.reference_score_mean={mean}", f"ppo.reference_score_std={std}"]
    of = targets("ppo.scale_reward=reference", "ppo.scale_reward_shift=true", *given)
    assert rewards(of(2.0, 6.0)) == pytest.approx(expected, abs=1e-6)


def test_moments_are_those_of_all_ranks(compose: Compose) -> None:
    class WithAnother(Ranks):
        """The other rank has seen the scores 5 and 7."""

        def reduce_metrics(self, metrics: Metrics) -> Metrics:
            theirs = Moments.of(torch.tensor([5.0, 7.0]))
            return {name: metric + theirs for name, metric in metrics.items()}

    maker = maker_of(compose, "ppo.scale_reward=running", ranks=WithAnother())
    made = targets_of(maker, rollout_of(1.0, 3.0), kl_ctl=0.0)
    # 1, 3, 5, 7: deviation sqrt(5)
    assert rewards(made) == pytest.approx([1 / 5**0.5, 3 / 5**0.5], abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ("running", [0.0, 2**0.5]),  # of 3, 5, 5, 7: mean 5, deviation sqrt(2)
        ("reference", [1.0, 3.0]),  # of 3, 5: mean 4, deviation 1
    ],
)
def test_a_score_that_is_not_finite_is_left_out_of_the_moments(
    scaling: str, expected: list[float], bad: float, targets: With
) -> None:
    of = targets(f"ppo.scale_reward={scaling}", "ppo.scale_reward_shift=true")
    of(bad, bad)  # no finite score sets no scale
    of(3.0, bad, 5.0)
    assert rewards(of(5.0, 7.0)) == pytest.approx(expected, abs=1e-6)


def test_parts_are_normalised_each_by_itself_and_continue_from_a_checkpoint(
    compose: Compose,
) -> None:
    config = to_run_config(compose(BARE)).ppo
    parts = {
        "far": RewardTerm(kind=RewardKind.model, normalise=True, weight=2.0),
        "near": RewardTerm(kind=RewardKind.stop),
    }
    one, other = (TargetMaker(config, Ranks(), parts) for _ in range(2))

    def rewards_of(maker: TargetMaker, *far: float) -> list[float]:
        near = [0.5] * len(far)
        scores_BK = torch.tensor([far, near]).T
        mixed = rollout_of(*(2 * score + 0.5 for score in far))
        scored = TermScores(scores_BK, torch.zeros_like(scores_BK, dtype=torch.bool))
        return rewards(targets_of(maker, mixed._replace(parts=scored), kl_ctl=0.0))

    # 100, 300: mean 200, deviation 100; then 100, 300, 500, 700: mean 400, deviation sqrt(50000)
    assert rewards_of(one, 100, 300) == pytest.approx([0.5 - 2, 0.5 + 2])
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    expected = [0.5 + 2 * 100 / 50000**0.5, 0.5 + 2 * 300 / 50000**0.5]
    assert rewards_of(one, 500, 700) == pytest.approx(expected)
    assert rewards_of(other, 500, 700) == pytest.approx(expected)


def test_scores_are_clipped(targets: With) -> None:
    assert rewards(targets()(1.0, 7.0)) == [1.0, 7.0]
    assert rewards(targets("ppo.clip_reward_value=2")(1.0, -3.0)) == [1.0, -2.0]
    scaled = targets("ppo.clip_reward_value=2", "ppo.scale_reward=reference")  # by 2, then clipped
    assert rewards(scaled(2.0, 6.0)) == pytest.approx([1.0, 2.0], abs=1e-6)


def test_a_response_without_an_end_gets_the_score_that_is_given(compose: Compose) -> None:
    """Neither clipped nor less the penalty; zero is a score as well."""
    rollout = rollout_of(4.0, 4.0)
    responses = rollout.responses._replace(ended_B=torch.tensor([True, False]))
    for score in (-3.0, 0.0):
        keys = [f"ppo.missing_end_score={score}", "ppo.missing_end_penalty=7"]
        maker = maker_of(compose, *keys, "ppo.clip_reward_value=1")
        made = maker.make(rollout._replace(responses=responses), kl_ctl=0.0)
        assert rewards(made) == [1.0, score]


def test_groups_have_the_scores_that_are_compared(targets: With) -> None:
    rloo = ["ppo.advantage_estimator=rloo", "ppo.responses_per_prompt=2"]
    clipped = targets("ppo.clip_reward_value=5", *rloo)(7.0, 9.0, 1.0, 2.0)
    assert clipped.clipped_scores_GR.tolist() == [[5.0, 5.0], [1.0, 2.0]]
    alone = targets("ppo.responses_per_prompt=2")(7.0, 9.0)
    assert alone.clipped_scores_GR.tolist() == [[7.0], [9.0]], "GAE compares no responses"


def test_whitening_can_be_turned_on(targets: With) -> None:
    made = targets("ppo.whiten_advantages=true")(1.0, 3.0)
    assert made.raw.advantages_BT.tolist() == [[1.0, 1.0], [3.0, 3.0]]
    expected = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    torch.testing.assert_close(made.advantages.advantages_BT, expected, atol=1e-6, rtol=0)


def test_masked_responses_count_in_their_group_but_not_in_whitening(compose: Compose) -> None:
    rollout = rollout_of(1.0, 3.0, 5.0, 11.0)
    ended_B = torch.tensor([True, True, True, False])
    rollout = rollout._replace(responses=rollout.responses._replace(ended_B=ended_B))
    group = ["ppo.advantage_estimator=dr_grpo", "ppo.responses_per_prompt=4"]
    group += ["ppo.missing_end_penalty=4"]  # 7, so that the mean is 4
    plain = {(*group, "ppo.whiten_advantages=false"): [-3.0, -1.0, 1.0]}
    white = {(*group, "ppo.whiten_advantages=true"): [-2.0, 0.0, 2.0]}
    white |= {("ppo.whiten_advantages=true",): [-2.0, 0.0, 2.0]}  # of 1, 3 and 5
    for keys, expected in (plain | white).items():
        made = maker_of(compose, "ppo.missing_end_mask=true", *keys).make(rollout, kl_ctl=0.0)
        deviation = (8 / 3) ** 0.5 if keys in white else 1.0
        found_B = made.advantages.advantages_BT[:3, 1]
        assert found_B.tolist() == pytest.approx([x / deviation for x in expected], abs=1e-6)
    keys = ("ppo.advantage_estimator=reinforce_pp", "ppo.whiten_advantages=false")
    keys += ("ppo.missing_end_mask=true", "ppo.whiten_rewards=true")
    made = maker_of(compose, *keys).make(rollout, kl_ctl=0.0)
    # of 0, 1, 0, 3, 0, 5: mean 1.5, variance 43/12
    expected = [1.5 + (x - 1.5) / (43 / 12) ** 0.5 for x in (1.0, 3.0, 5.0)]
    assert made.advantages.advantages_BT[:3, 1].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("keys", "kl"),
    [
        # log pi - log reference is 2 and -1
        ([], [2.0, -1.0]),
        (["ppo.kl_estimator=k2"], [2.0, 0.5]),
        (["ppo.kl_estimator=k3"], [1.1353353, 0.7182818]),  # e^-2 + 1, e - 2
        (["ppo.kl_estimator=k3", "ppo.kl_placement=loss"], [0.0, 0.0]),
    ],
)
def test_the_penalty_on_the_kl_is_in_the_rewards(
    keys: list[str], kl: list[float], compose: Compose
) -> None:
    rollout = rollout_of(1.0)._replace(logprobs_BT=torch.tensor([[-1.0, -2.0]]))
    rollout = rollout._replace(reference_logprobs_BT=torch.tensor([[-3.0, -1.0]]))
    made = maker_of(compose, *keys).make(rollout, kl_ctl=0.25)
    assert made.rewards_BT[0].tolist() == pytest.approx([-kl[0] / 4, 1 - kl[1] / 4])


def test_held_out_answers_do_not_move_the_scale(compose: Compose) -> None:
    maker = maker_of(compose, "ppo.gamma=1", "ppo.scale_reward=running")
    held_out = rollout_of(4.0, 10.0)._replace(values_BT=torch.tensor([[1.0, 2.0], [0.0, 0.0]]))
    before = maker.held_out_targets(held_out, kl_ctl=0)
    assert before.rewards_BT.tolist() == [[0.0, 4.0], [0.0, 10.0]]
    assert before.advantages_BT.tolist() == [[3.0, 2.0], [10.0, 10.0]], "no rollout has set a scale"
    maker.update_moments(rollout_of(0.0, 4.0))  # deviation 2
    for _ in range(2):
        after = maker.held_out_targets(held_out, kl_ctl=0)
        torch.testing.assert_close(after.advantages_BT, torch.tensor([[1.0, 0.0], [5.0, 5.0]]))


def test_an_estimator_over_groups_has_no_held_out_targets(compose: Compose) -> None:
    maker = maker_of(compose, "ppo.advantage_estimator=rloo", "ppo.responses_per_prompt=2")
    assert maker.held_out_targets(rollout_of(1.0, 2.0, 3.0), kl_ctl=0) is None


@pytest.mark.parametrize(("lam_critic", "alpha"), [(None, None), (1.0, None), (None, 0.3)])
def test_decoupled_lambdas_and_a_teacher_equal_the_loops(
    compose: Compose, lam_critic: float | None, alpha: float | None
) -> None:
    """Random rows with garbage behind them: VC-PPO's returns, VAPO's lambda, a teacher's reward."""
    keep_BT = keep_of([5, 1, 3, 4], 6)
    policy_BT, teacher_BT, values_BT = (
        with_garbage(normal(4, 6, seed=seed), keep_BT, torch.nan) for seed in range(3)
    )
    scores_B = normal(4, seed=3)
    rollout = rollout_of(*[0.0] * 4)._replace(
        responses=Responses(torch.zeros(4, 6).long(), keep_BT, keep_BT[:, 0]),
        logprobs_BT=policy_BT,
        reference_logprobs_BT=teacher_BT,
        values_BT=values_BT,
        scores_B=scores_B,
    )
    keys = ["ppo.lam=0.7", "ppo.gamma=0.9", "ppo.kl_placement=advantage"]
    keys += [] if lam_critic is None else [f"ppo.lam_critic={lam_critic}"]
    keys += [] if alpha is None else [f"ppo.lam_length_alpha={alpha}"]
    found = maker_of(compose, *keys).make(rollout, kl_ctl=0.5).advantages
    for row in range(4):
        kept = keep_BT[row]
        policy, teacher, values = (
            [x[row][kept].tolist()] for x in (policy_BT, teacher_BT, values_BT)
        )
        rewards = [[*[0.0] * (len(values[0]) - 1), scores_B[row].item()]]
        lam = 0.7 if alpha is None else max(0.0, 1 - 1 / (alpha * len(values[0])))
        ((*advantages,),), _ = loop_reference.gae(rewards, values, gamma=0.9, lam=lam)
        (kl,) = loop_reference.kl_per_token(policy, teacher, "k1")
        expected = [a - 0.5 * x for a, x in zip(advantages, kl, strict=True)]
        assert_close(found.advantages_BT[row][kept], expected, atol=1e-6)
        _, (returns,) = loop_reference.gae(rewards, values, gamma=0.9, lam=lam_critic or 0.7)
        assert_close(found.returns_BT[row][kept], returns, atol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "advantage"),
    [
        # scores 1 and 4: less the other, less the mean 2.5, and over the deviation 2.1213203
        ("rloo", 3.0),
        ("dr_grpo", 1.5),
        ("grpo", 0.7071065),
    ],
)
def test_groups_are_compared(estimator: str, advantage: float, targets: With) -> None:
    keys = [f"ppo.advantage_estimator={estimator}", "ppo.responses_per_prompt=2"]
    for whitens, used in ("null", advantage), ("true", 1.0):
        made = targets(*keys, f"ppo.whiten_advantages={whitens}")(1.0, 4.0)
        for found, expected in (made.raw, advantage), (made.advantages, used):
            expected_BT = torch.tensor([[-expected] * 2, [expected] * 2])
            torch.testing.assert_close(found.advantages_BT, expected_BT, atol=1e-6, rtol=0)


def test_reinforce_pp_takes_discounted_rewards_to_go(targets: With) -> None:
    keys = ["ppo.advantage_estimator=reinforce_pp", "ppo.gamma=0.5"]
    assert targets(*keys)(1.0, 3.0).raw.advantages_BT.tolist() == [[0.5, 1.0], [1.5, 3.0]]
    # of 0, 1, 0, 3: mean 1, deviation sqrt(1.5)
    made = targets(*keys, "ppo.whiten_rewards=true")(1.0, 3.0)
    assert rewards(made) == [1.0, 3.0], "as they are logged"
    low, high = 1 - 1.5**-0.5, 1 + 2 * 1.5**-0.5
    expected = torch.tensor([[low + 0.5, 1.0], [low + high / 2, high]])
    torch.testing.assert_close(made.raw.advantages_BT, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_pp"])
def test_a_teacher_rewards_each_token_alone(compose: Compose, estimator: str) -> None:
    """kl_placement=advantage: log teacher - log pi of a token is in no other token's advantage."""
    keys = [f"ppo.advantage_estimator={estimator}", "ppo.kl_placement=advantage"]
    teacher_BT = torch.tensor([[-0.5, 0.25], [2.0, -1.0]])
    rollout = rollout_of(0.0, 3.0)._replace(reference_logprobs_BT=teacher_BT)
    found = maker_of(compose, *keys).make(rollout, kl_ctl=0.5)
    scores_BT = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
    torch.testing.assert_close(found.advantages.advantages_BT, scores_BT + 0.5 * teacher_BT)
    assert found.rewards_BT.tolist() == [[0.0, 0.0], [0.0, 3.0]]
