"""Operations, speed and MFU of PPO's steps, by hand."""

import pytest
import torch

from rlhf.base.ranks import Ranks
from rlhf.base.types import PromptBatch, Responses, Rollout
from rlhf.config.freeze import to_run_config
from rlhf.phases.ppo.step_metrics import PerStage, StepSpeed
from tests.conftest import Compose

HIDDEN, LAYERS, VOCABULARY = 96, 4, 1024
PEAK = 2e12  # operations per second
SECONDS = PerStage(generate=0.5, score=0.25, train=1.0)


def rollout(*, with_policy: bool) -> Rollout:
    """One prompt of 6 tokens and a response of 4, both padded, scored with the policy or not."""
    attend_BP = torch.tensor([[False] * 2 + [True] * 6])
    keep_BT = torch.tensor([[True] * 4 + [False]])
    zeros_BT = torch.zeros(1, 5)
    prompts = PromptBatch(attend_BP.long(), attend_BP, torch.zeros(1, 5), ["a"])
    responses = Responses(keep_BT.long(), keep_BT, torch.tensor([True]), zeros_BT)
    seconds = {"generate": SECONDS.generate, "score": SECONDS.score}
    return Rollout(
        prompts,
        responses,
        zeros_BT.clone(),
        zeros_BT,
        zeros_BT,
        torch.zeros(1),
        seconds,
        reuses_logprobs=not with_policy,
    )


# Per token and weight 2 operations; per layer 12 hidden ** 2 weights in products; attention over
# half of 10 x 10 places, twice 2 operations for each of the hidden dimensions; logits at the places
# of the response, values at the same.
TRUNK = 10 * 2 * LAYERS * 12 * HIDDEN**2 + LAYERS * 2 * HIDDEN * 100
ACTOR = TRUNK + 4 * 2 * VOCABULARY * HIDDEN
SCORER = TRUNK + 4 * 2 * HIDDEN

CHECKPOINTED = ["model.gradient_checkpointing=true"]
# Two passes of two updates of both models.
BOTH = {"ppo/updates": 4, "ppo/actor_learning_rate": 1.0, "ppo/critic_learning_rate": 1.0}


@pytest.mark.parametrize(
    ("overrides", "more", "with_policy", "score", "train"),
    [
        ([], {}, True, 2 * ACTOR + 2 * SCORER, 2 * 3 * (ACTOR + SCORER)),
        ([], {}, False, ACTOR + 2 * SCORER, 2 * 3 * (ACTOR + SCORER)),
        ([], {"ppo/updates": 2}, False, ACTOR + 2 * SCORER, 3 * (ACTOR + SCORER)),
        ([], {"ppo/updates": 1}, False, ACTOR + 2 * SCORER, 1.5 * (ACTOR + SCORER)),
        (CHECKPOINTED, {}, False, ACTOR + 2 * SCORER, 6 * (ACTOR + SCORER)),
        (["experiment=rloo"], {}, False, ACTOR + SCORER, 2 * 3 * ACTOR),
        (["experiment=gold_rloo"], {}, False, ACTOR, 2 * 3 * ACTOR),
    ],
)
def test_operations_by_hand(
    compose: Compose,
    overrides: list[str],
    more: dict[str, float],
    *,
    with_policy: bool,
    score: float,
    train: float,
) -> None:
    peak = [f"hardware.{name}_tflops={PEAK / 1e12}" for name in ("peak", "fp32")]
    speed = StepSpeed(to_run_config(compose([*overrides, *peak])), Ranks())
    values = speed.metrics(
        rollout(with_policy=with_policy), BOTH | more, train_seconds=SECONDS.train
    )
    done = PerStage(generate=ACTOR, score=score, train=train)
    for part, operations, seconds in zip(PerStage._fields, done, SECONDS, strict=True):
        assert values[f"speed/{part}_tflops"] == pytest.approx(operations / seconds / 1e12)
        assert values[f"speed/{part}_mfu"] == pytest.approx(operations / seconds / PEAK)
    assert values["time/step_seconds"] == 1.75
    assert values["speed/tokens_per_second"] == pytest.approx(10 / 1.75)


def test_a_model_whose_shape_is_unknown_has_times_only(compose: Compose) -> None:
    unknown = ["model=pretrained", "model.path=folder", "experiment=smoke"]
    speed = StepSpeed(to_run_config(compose(unknown)), Ranks())
    values = speed.metrics(rollout(with_policy=True), BOTH, train_seconds=SECONDS.train)
    assert not [name for name in values if "flops" in name or "mfu" in name]
    assert values["time/train_seconds"] == 1.0


def test_an_actor_that_rests_is_not_counted(compose: Compose) -> None:
    speed = StepSpeed(to_run_config(compose([])), Ranks())
    values = {"ppo/updates": 4, "ppo/critic_learning_rate": 1.0}
    found = speed.metrics(rollout(with_policy=True), values, train_seconds=1.0)
    assert found["speed/train_tflops"] == pytest.approx(2 * 3 * SCORER / 1e12)
