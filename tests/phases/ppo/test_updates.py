"""The updates of one rollout: how many, over what, and what each model is asked to learn."""

import json
import math
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.base.metrics import Metrics
from rlhf.base.ranks import Ranks
from rlhf.base.types import PromptBatch, Responses, Rollout, StepReport
from rlhf.config.batches import BatchPlan
from rlhf.config.freeze import to_run_config
from rlhf.config.roles import Role
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.models import Learner
from rlhf.phases.ppo.objective import MicroBatch, Objective
from rlhf.phases.ppo.step_metrics import num_optimizer_steps
from rlhf.phases.shared.scoring import ResponseLogprobs
from tests.conftest import Compose
from tests.phases.ppo.ppo_pieces import UNTIMED, engine_config

Trained = Callable[..., SimpleNamespace]
ROWS, T = 4, 3


class Engine:
    """Writes down the losses that it is given."""

    lr_scale = 1.0
    module = nn.Module()  # without dropout

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.steps = 0

    def backward(self, loss: Tensor) -> None:
        self.losses.append(loss.item())

    def has_overflow(self) -> bool:
        return False

    def step(self, *, discard: bool = False) -> StepReport:
        self.steps += 1
        return StepReport(0.5, 2.0, is_skipped=discard)


class Answers:
    """Models that always answer the same, and write down what they are asked to learn."""

    def __init__(self, *, drift: float) -> None:
        self._drift = drift
        self.actor, self.critic = Engine(), Engine()
        self.rows: list[list[int]] = []

    def learner_groups(self, *, trains_actor: bool) -> list[list[Learner]]:
        critic = Learner(Role.critic, self.critic, self._values)
        actor = Learner(Role.actor, self.actor, self._policy)
        return [[critic], [actor]] if trains_actor else [[critic]]

    def _values(self, batch: MicroBatch, objective: Objective) -> tuple[Tensor, Metrics]:
        self.rows.append(batch.sequences.ids_BS[:, 0].tolist())
        return objective.critic_loss(torch.full(batch.keep_BT.shape, 2.0), batch)

    def _policy(self, batch: MicroBatch, objective: Objective) -> tuple[Tensor, Metrics]:
        shape = batch.keep_BT.shape
        policy = ResponseLogprobs(torch.full(shape, -1.0 + self._drift), torch.full(shape, 0.5))
        return objective.actor_loss(policy, batch)


def rollout(score: float, cut: Collection[int] = ()) -> Rollout:
    """Rows 0 to 3, told apart by their first response token; values are 0, the scores equal."""
    ids_BT = torch.arange(ROWS)[:, None].expand(ROWS, T).contiguous()
    keep_BT = torch.ones(ROWS, T, dtype=torch.bool)
    zeros_BT = torch.zeros(ROWS, T)
    prompts = PromptBatch(ids_BT[:, :1], keep_BT[:, :1], zeros_BT, [""] * ROWS)
    responses = Responses(ids_BT, keep_BT, torch.tensor([row not in cut for row in range(ROWS)]))
    scores_B = torch.full((ROWS,), score)
    return Rollout(prompts, responses, zeros_BT - 1, zeros_BT - 1, zeros_BT, scores_B)


@pytest.fixture
def trained(compose: Compose) -> Trained:
    """A trainer and its models after some rollouts under these overrides."""

    def after(
        *overrides: str,
        rollouts: int = 1,
        drift: float = 0.0,
        score: float = 0.0,
        cut: Collection[int] = (),
    ) -> SimpleNamespace:
        config = to_run_config(compose(["ppo.ppo_epochs=1", *overrides])).ppo
        models = Answers(drift=drift)
        engine: Any = SimpleNamespace(
            models=models,
            actor=models.actor,
            has_critic=True,
            ranks=Ranks(),
            plan=BatchPlan(per_rank=2, micro=1, accumulation=2),
            config=engine_config(max_tokens=6),
            constant_metrics={},
            speed=UNTIMED,
        )
        trainer = PPOTrainer(engine, config)
        stats = [trainer.train_rlhf(rollout(score, cut)) for _ in range(rollouts)]
        return SimpleNamespace(engine=engine, models=models, stats=stats, trainer=trainer)

    return after


def test_every_pass_takes_each_response_once_in_an_order_of_its_own(trained: Trained) -> None:
    models = trained("ppo.ppo_epochs=8").models
    assert models.critic.steps == 8 * 2  # two mini-batches of two rows each
    taken = [row for rows in models.rows for row in rows]
    passes = [taken[i : i + ROWS] for i in range(0, len(taken), ROWS)]
    assert all(sorted(rows) == [0, 1, 2, 3] for rows in passes)
    assert len({tuple(rows) for rows in passes}) > 1


def test_the_value_loss_has_its_weight(trained: Trained) -> None:
    # values of 2 for returns of 0, three of a mini-batch's six tokens: 0.5 * 2^2 / 2
    free = "ppo.cliprange_value=null"
    for more, expected in ([], 1.0), (["ppo.value_coef=0.1"], 0.1):
        losses = trained(free, *more).models.critic.losses
        assert losses == pytest.approx([expected] * ROWS)


@pytest.mark.parametrize("cut", [(), (1,), (0, 2, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_masked_responses_enter_no_loss_and_no_count(
    trained: Trained, aggregation: str, cut: tuple[int, ...]
) -> None:
    # Of each token: an entropy of 0.5, a KL to the reference of 0.1^2 / 2, a squared error of 2^2.
    keys = ["ppo.missing_end_mask=true", "ppo.entropy_coef=0.2", "ppo.kl_placement=loss"]
    keys += ["ppo.kl_estimator=k2", "ppo.kl_ctl=1", f"ppo.loss_aggregation={aggregation}"]
    run = trained(*keys, "ppo.cliprange_value=null", drift=0.1, cut=cut)
    learned = run.models.rows
    for place, (row,) in enumerate(learned):
        ended = [other not in cut for (other,) in learned[place // 2 * 2 :][:2]]
        share = 0.0 if row in cut else 1 / sum(ended)
        of_actor = {"token_mean": share, "sequence_mean": 1 / 2, "fixed_length": 3 / 12}
        weight = of_actor[aggregation] * (row not in cut)
        assert run.models.actor.losses[place] == pytest.approx(weight * (0.005 - 0.1))
        assert run.models.critic.losses[place] == pytest.approx(share * 2)
    found = run.stats[0].metrics
    assert found["ppo/ended_share"] == 1 - len(cut) / ROWS
    assert found.get("ppo/entropy") == (0.5 if len(cut) < ROWS else None)
    assert found.get("ppo/kl_loss") == (pytest.approx(0.005) if len(cut) < ROWS else None)
    assert all(map(math.isfinite, found.values()))


def test_an_entropy_bonus_follows_its_target(trained: Trained) -> None:
    # The entropy is always 0.5, on half of a mini-batch's tokens: a loss of coefficient * -0.25.
    keys = ["ppo.entropy_coef=0.2", "ppo.entropy_coef_step=0.05"]
    for target, weights in (0.6, [0.2, 0.25, 0.3]), (0.4, [0.2, 0.0, 0.0]):
        run = trained(*keys, f"ppo.entropy_target={target}", rollouts=3)
        assert [s.metrics["ppo/entropy_coef"] for s in run.stats] == pytest.approx(weights)
        losses = [-0.25 * weight for weight in weights for _ in range(ROWS)]
        assert run.models.actor.losses == pytest.approx(losses)
        resumed = trained(*keys, f"ppo.entropy_target={target}", rollouts=0).trainer
        resumed.load_state_dict(json.loads(json.dumps(run.trainer.state_dict())))
        after = [x.train_rlhf(rollout(0.0)).metrics for x in (run.trainer, resumed)]
        assert after[0]["ppo/entropy_coef"] == after[1]["ppo/entropy_coef"] not in weights[:1]
        older = {name: value for name, value in resumed.state_dict().items() if name != "entropy"}
        resumed.load_state_dict(older)  # checkpoints of older versions have no controller


def test_only_the_critic_learns_first(trained: Trained) -> None:
    run = trained("ppo.actor_freeze_steps=2", rollouts=3)
    assert len(run.models.critic.losses) == 12  # four micro-batches in a rollout
    assert len(run.models.actor.losses) == 4
    for name in ("ppo/actor_loss", "ppo/actor_learning_rate"):
        assert [name in stats.metrics for stats in run.stats] == [False, False, True]
    assert run.stats[0].actor_loss == 0.0
    assert run.stats[0].metrics["ppo/critic_learning_rate"] == 0.5
    assert [num_optimizer_steps(stats.metrics) for stats in run.stats] == [2, 2, 4]


# The policy moved by log 1.5 on every token: KL(old || new) is 0.5 - log 1.5 = 0.0945.
DRIFT = 0.4054651


def test_updates_stop_where_the_policy_has_moved_too_far(trained: Trained) -> None:
    def updates(limit: str) -> int:
        run = trained("ppo.ppo_epochs=4", f"ppo.stop_update_kl={limit}", drift=DRIFT)
        assert run.stats[0].metrics["ppo/approx_kl"] == pytest.approx(0.0945349)
        assert run.models.actor.steps == run.models.critic.steps
        return run.models.actor.steps

    assert updates("0.09") == 1
    assert updates("0.1") == updates("null") == 8


def test_the_learning_rate_is_guarded(trained: Trained) -> None:
    assert trained("ppo.lr_guard_kl=0.09", drift=DRIFT).engine.actor.lr_scale < 1.0
    assert trained("ppo.lr_guard_kl=0.1", drift=DRIFT).engine.actor.lr_scale == 1.0
    assert trained("ppo.lr_guard_kl=null", drift=DRIFT).engine.actor.lr_scale == 1.0
