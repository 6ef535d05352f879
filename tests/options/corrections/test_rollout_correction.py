"""Weights of a rollout that another policy sampled, in a whole PPO step."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.algorithms.masking import masked_sum
from rlhf.base.ranks import Ranks
from rlhf.base.types import Rollout
from rlhf.config.freeze import to_run_config
from rlhf.options.corrections.hooks import effective_sample_share
from rlhf.phases.ppo.hooks import build_hooks
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.objective import SURROGATES, SurrogateInputs
from tests.conftest import Compose
from tests.phases.ppo.ppo_pieces import LENGTHS, OneOfTwo, maker_of, some_rollout
from tests.phases.ppo.test_logprob_reuse import trainer_of
from tests.phases.ppo.test_targets import BARE, rollout_of

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


def test_correction_multiplies_the_advantages_that_updates_use(compose: Compose) -> None:
    plain = rollout_of(1.0, 3.0)
    sampled_BT = torch.tensor([[0.1, -0.1], [-9.0, 0.0]])
    measured = plain._replace(responses=plain.responses._replace(logprobs_BT=sampled_BT))
    correction = ["ppo.rollout_correction=token"]
    masks = ["ppo.rollout_correction_mode=mask", "ppo.rollout_correction_floor=0.95"]
    without, found, masked = (
        maker_of(to_run_config(compose([*BARE, *more]))).make(measured, kl_ctl=0.0)
        for more in ([], correction, [*correction, *masks])
    )
    assert not without.metrics
    ratios_BT = torch.tensor([[-0.1, 0.1], [9.0, 0.0]]).exp()
    rejecting_BT = ratios_BT * torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    for targets, weights_BT in ((found, ratios_BT.clamp(max=2.0)), (masked, rejecting_BT)):
        weight = targets.metrics["ppo/rollout_weight"].value()
        assert weight == pytest.approx(weights_BT.mean().item())
        expected_BT = without.advantages.advantages_BT * weights_BT
        torch.testing.assert_close(targets.advantages.advantages_BT, expected_BT)
        assert torch.equal(targets.advantages.returns_BT, without.advantages.returns_BT)
        assert torch.equal(targets.raw.advantages_BT, without.raw.advantages_BT)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_the_mask_takes_the_gradient_of_bad_responses_that_are_far(
    compose: Compose, aggregation: str
) -> None:
    """Rows 0 and 1 are far, 2 and 3 are near; only row 0 is far and bad."""
    keys = ["ppo.off_policy_mask_kl=0.25", f"ppo.loss_aggregation={aggregation}"]
    config = to_run_config(compose([*keys, "ppo.cliprange=0.9", "ppo.surrogate=gspo"]))
    (hook,) = build_hooks(config)
    assert hook.logprob_reuse_mode_for_auto is None, "without weights nothing is recomputed"
    keep_BT = torch.ones(4, 3, dtype=torch.bool)
    keep_BT[0, 2] = False
    logprobs_BT = -torch.tensor([[0.2, 0.4, 9.0], [0.3] * 3, [0.2] * 3, [-0.3] * 3])
    advantages_BT = torch.tensor([[-1.0, -2.0, 0.0], [1.0] * 3, [-1.0] * 3, [-1.0] * 3])
    totals = {}
    for name, surrogate in {
        "plain": SURROGATES[config.ppo.surrogate],
        "masked": hook.change_surrogate(SURROGATES[config.ppo.surrogate]),
    }.items():
        slopes = []
        for rows in ([0, 1, 2, 3], [0, 2], [1, 3]):  # whole, and as two micro-batches
            at_BT = logprobs_BT[rows].requires_grad_()
            zeros_BT = 0 * logprobs_BT[rows]
            inputs = SurrogateInputs(at_BT, zeros_BT, advantages_BT[rows], keep_BT[rows], zeros_BT)
            loss, metrics = surrogate(inputs, config.ppo, masked_sum)
            loss.loss.backward()
            slopes.append(at_BT.grad)
            totals.setdefault(name, metrics)
        assert torch.equal(slopes[0][[0, 2, 1, 3]], torch.cat(slopes[1:]))
        is_zero_B = slopes[0].eq(0).all(dim=1)
        assert is_zero_B.tolist() == [name == "masked", False, False, False]
    assert totals["masked"]["ppo/off_policy_masked_share"].value() == pytest.approx(2 / 11)
    assert not totals["plain"]


@pytest.mark.parametrize(
    ("mode", "keys"), [("always", []), ("never", []), ("auto", ["ppo.rollout_correction=token"])]
)
def test_limits_compare_with_the_policy_that_sampled(
    compose: Compose, mode: str, keys: list[str]
) -> None:
    """Before any update the sampler differs, by a third of the error in a mean of three tokens."""
    for limit, is_reached in (0.31, False), (0.01, True):
        words = [*keys, "ppo.ppo_epochs=1", f"ppo.off_policy_mask_kl={limit}"]
        found = metrics_of(trainer_of(compose, mode, *words, error=ERROR))
        assert (found["ppo/off_policy_masked_share"] > 0) == is_reached
    # 7 of 13 tokens have k3 = exp(-0.3) - 1 + 0.3, the others exp(0.3) - 1 - 0.3.
    kl = (7 * (math.exp(-ERROR) - 1 + ERROR) + 6 * (math.exp(ERROR) - 1 - ERROR)) / 13
    for limit, updates in (0.99 * kl, 1), (10 * kl, 2):
        trainer = trainer_of(compose, mode, *keys, f"ppo.stop_update_kl={limit}", error=ERROR)
        trainer.engine.models.actor.lr_scale = 0.0
        found = metrics_of(trainer)
        assert found["ppo/updates"] == updates


def slow_share(rollout: Rollout, level: str, *, masks: bool) -> float:
    """The effective sample size of the rollout's weights before limits, one number at a time."""
    assert rollout.responses.logprobs_BT is not None
    weights = []
    sides = (rollout.logprobs_BT, rollout.responses.logprobs_BT, rollout.responses.ended_B)
    for ours_T, theirs_T, ended, length in zip(*sides, LENGTHS, strict=True):
        if masks and not ended:
            continue
        own = [float(ours_T[t]) - float(theirs_T[t]) for t in range(length)]
        match level:
            case "token":
                weights += [math.exp(each) for each in own]
            case "sequence":
                weights.append(math.exp(sum(own)))
            case "geometric":
                weights.append(math.exp(sum(own) / length))
    return sum(weights) ** 2 / (len(weights) * sum(each**2 for each in weights))


@pytest.mark.parametrize("ranks", [Ranks(), OneOfTwo(size=2)])
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_the_learning_rate_follows_the_effective_sample_size(
    compose: Compose, level: str, masks: bool, ranks: Ranks
) -> None:
    keys = [f"ppo.rollout_correction={level}", "ppo.rollout_correction_lr=true"]
    keys += ["ppo.rollout_correction_mode=mask", "ppo.rollout_correction_cap=1.01"]  # no matter
    keys += [f"ppo.missing_end_mask={masks}"]
    config = to_run_config(compose(keys))
    (hook,) = build_hooks(config)
    for seed in range(3):
        plain = some_rollout(seed=seed)
        error_BT = torch.randn(plain.values_BT.shape, generator=torch.Generator().manual_seed(seed))
        sampled_BT = (plain.logprobs_BT + error_BT).masked_fill(~plain.responses.keep_BT, math.nan)
        rollout = plain._replace(responses=plain.responses._replace(logprobs_BT=sampled_BT))
        share = slow_share(rollout, level, masks=masks)
        assert share < 0.9
        assert effective_sample_share(config.ppo, rollout, ranks) == pytest.approx(share, rel=1e-5)
        actor = SimpleNamespace(lr_scale=0.1)  # as a step before, or a checkpoint, left it
        trainer: Any = SimpleNamespace(engine=SimpleNamespace(actor=actor, ranks=ranks))
        _, logged = hook.prepare_rollout(trainer, rollout)
        assert logged == {"ppo/lr_scale": actor.lr_scale}
        assert actor.lr_scale == pytest.approx(math.sqrt(share), rel=1e-5)
        weight = maker_of(config).make(rollout, kl_ctl=0.0).metrics["ppo/rollout_weight"]
        assert weight.count == sum(LENGTHS) - masks * LENGTHS[1], "response 1 has not ended"
        hook.prepare_rollout(trainer, plain)
        assert actor.lr_scale == 1.0, "nothing was measured while sampling"


def test_without_the_key_the_learning_rate_stays(compose: Compose) -> None:
    mask = ["ppo=vcpo", "ppo.rollout_correction=none", "ppo.off_policy_mask_kl=0.1"]
    nothing: Any = None
    for keys in (["ppo.rollout_correction=token"], mask):
        (hook,) = build_hooks(to_run_config(compose(keys)))
        assert hook.prepare_rollout(nothing, rollout := some_rollout()) == (rollout, {})
