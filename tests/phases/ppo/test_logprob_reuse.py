"""When PPO takes the rollout's own log-probabilities, and what it measures of them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf.base.errors import ConfigError
from rlhf.base.metrics import Mean, Metrics
from rlhf.base.ranks import Ranks
from rlhf.base.types import Responses, Rollout
from rlhf.config.choices import When
from rlhf.config.freeze import to_run_config
from rlhf.models.build import build_actor
from rlhf.options import Backend
from rlhf.options.corrections.keys import RolloutCorrection
from rlhf.phases.ppo.hooks import build_hooks
from rlhf.phases.ppo.logprob_reuse import MISMATCH, LogprobReuse
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.shared.scoring import score_responses
from tests.conftest import Compose
from tests.phases.ppo.ppo_pieces import (
    MICRO,
    engine_config,
    kept,
    log_distributions,
    separate_engine,
    some_rollout,
)

ERROR = 0.01  # of every log-probability that the rollout measured


def settings(mode: str, *, limit: float = 0.05) -> Any:
    return SimpleNamespace(
        backend=Backend.hf, reuse_logprobs=When(mode), max_logprob_mismatch=limit
    )


def ppo_with(dropout: float) -> Any:
    return SimpleNamespace(actor_dropout=dropout)


def responses(*, measured: bool = True) -> Responses:
    given = some_rollout().responses
    return given._replace(logprobs_BT=torch.zeros(given.ids_BT.shape)) if measured else given


@pytest.mark.parametrize(
    ("mode", "mismatch", "dropout", "reuses"),
    [
        ("always", None, 0.1, True),
        ("always", 9.0, 0.0, True),
        ("never", 0.0, 0.0, False),
        ("auto", None, 0.0, False),  # nothing is known yet
        ("auto", 0.05, 0.0, True),
        ("auto", 0.051, 0.0, False),
        ("auto", 0.0, 0.1, False),
        ("auto", float("nan"), 0.0, False),
    ],
)
def test_decisions(mode: str, mismatch: float | None, dropout: float, *, reuses: bool) -> None:
    reuse = LogprobReuse(settings(mode), ppo_with(dropout))
    if mismatch is not None:
        reuse.store_mismatch({MISMATCH: mismatch})
    reuse.store_mismatch({})  # a step that measured nothing changes nothing
    assert reuse.can_reuse(responses()) == reuses


def test_a_correction_reuses_nothing() -> None:
    """Its weights are against the policy that sampled, so the actor's own are computed."""
    config = engine_config(reuse_logprobs=When.auto, lag=1)
    ppo = replace(config.ppo, rollout_correction=RolloutCorrection.token)
    reuse = LogprobReuse(config.rollout, ppo, build_hooks(replace(config, ppo=ppo)))
    assert not reuse.can_reuse(responses())


def test_without_measured_logprobs_nothing_is_reused() -> None:
    reuse = LogprobReuse(settings("auto"), ppo_with(0.0))
    reuse.store_mismatch({MISMATCH: 0.0})
    assert not reuse.can_reuse(responses(measured=False))
    always = LogprobReuse(settings("always"), ppo_with(0.0))
    with pytest.raises(ConfigError, match=r"reuse_logprobs=always: rollout\.backend=hf measures"):
        always.can_reuse(responses(measured=False))


class Sampler:
    """Answers as ``some_rollout``, and tells the actor's own log-probabilities with an error."""

    def __init__(self, *, error: float) -> None:
        self.error = error

    def generate(self, actor: Any, _: Any) -> Responses:
        rollout = some_rollout()
        with torch.no_grad():
            logs_NV, ids_N = log_distributions(actor.module, rollout)
        given, signs_N = rollout.responses, torch.arange(len(ids_N)) % 2 * 2 - 1
        own_N = logs_NV.gather(1, ids_N[:, None])[:, 0] + self.error * signs_N
        garbage_BT = torch.full(given.ids_BT.shape, torch.nan)  # where no token is kept
        return given._replace(logprobs_BT=garbage_BT.masked_scatter(given.keep_BT, own_N))


def trainer_of(
    compose: Compose, mode: str, *overrides: str, error: float = ERROR, lag: int = 0, **options: Any
) -> PPOTrainer:
    engine = separate_engine(lr=0.02, **options)
    engine.rollout = Sampler(error=error)
    engine.config = engine_config(max_tokens=6, reuse_logprobs=When(mode), lag=lag)
    return PPOTrainer(engine, to_run_config(compose(["ppo.ppo_epochs=2", *overrides])).ppo)


def steps(trainer: PPOTrainer, count: int) -> list[tuple[bool, float | None]]:
    """Of each step whether log-probabilities were reused, and the mismatch that it told."""
    told = []
    for _ in range(count):
        rollout = trainer.generate_experience(some_rollout().prompts)
        told.append((rollout.reuses_logprobs, trainer.train_rlhf(rollout).metrics.get(MISMATCH)))
    return told


def test_auto_measures_first_and_then_reuses_and_measures_on(compose: Compose) -> None:
    told = steps(trainer_of(compose, "auto"), 3)
    assert [reused for reused, _ in told] == [False, True, True]
    # Also after updates, which move the weights: the two sides are of the same ones.
    assert [value for _, value in told] == pytest.approx([ERROR] * 3, abs=1e-5)


def test_auto_stops_reusing_what_has_gone_wrong(compose: Compose) -> None:
    trainer = trainer_of(compose, "auto", "ppo.ppo_epochs=1")
    steps(trainer, 1)
    trainer.engine.rollout.error = 0.3
    told = steps(trainer, 3)
    assert [reused for reused, _ in told] == [True, False, False]
    assert [value for _, value in told] == pytest.approx([0.3] * 3, abs=1e-5)


@pytest.mark.parametrize(("mode", "reuses"), [("auto", False), ("always", True)])
def test_no_mismatch_is_measured_under_the_dropout_of_adapters(
    mode: str, compose: Compose, monkeypatch: pytest.MonkeyPatch, *, reuses: bool
) -> None:
    """The actor's layers have it, and no key of ppo: its noise would be taken for a mismatch."""
    monkeypatch.setattr("tests.phases.ppo.ppo_pieces.build_actor", actor_with_dropout)
    told = steps(trainer_of(compose, mode, "ppo.ppo_epochs=1"), 2)
    assert [reused for reused, _ in told] == [reuses] * 2
    expected = [None] * 2 if reuses else pytest.approx([ERROR] * 2, abs=1e-5)
    assert [value for _, value in told] == expected


def actor_with_dropout(*arguments: Any, **options: Any) -> Any:
    model = build_actor(*arguments, **options)
    model.model.layers[0].self_attn.q_proj.lora_dropout = nn.Dropout(0.1)
    return model


@pytest.mark.parametrize(
    ("mode", "reuses", "error", "share"),
    [("always", True, 0.3, 1.0), ("never", False, 0.3, 1.0), ("never", False, 0.05, 0.0)],
)
def test_other_modes_measure_all_the_same(
    compose: Compose, mode: str, error: float, share: float, *, reuses: bool
) -> None:
    trainer = trainer_of(compose, mode, "ppo.ppo_epochs=1", error=error)
    for _ in range(2):
        rollout = trainer.generate_experience(some_rollout().prompts)
        assert rollout.reuses_logprobs == reuses
        metrics = trainer.train_rlhf(rollout).metrics
        assert metrics[MISMATCH] == pytest.approx(error, abs=1e-5)
        assert metrics[f"{MISMATCH}_share"] == share, "of differences that are large"
        assert metrics[f"{MISMATCH}_max"] == pytest.approx(error, abs=1e-5)


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_two_policies_have_no_mismatch(compose: Compose, mode: str) -> None:
    trainer = trainer_of(compose, mode, "ppo.ppo_epochs=1", lag=1)
    assert steps(trainer, 2) == [(mode == "auto", None)] * 2


def test_the_actor_is_not_run_to_score_what_is_reused(compose: Compose) -> None:
    trainer, runs = trainer_of(compose, "always"), []
    trainer.engine.actor.module.register_forward_hook(lambda *_: runs.append(1))
    rollout = trainer.generate_experience(some_rollout().prompts)
    assert not runs
    assert kept(rollout.logprobs_BT) == kept(rollout.responses.logprobs_BT)
    asked = score_responses(
        trainer.engine.models, rollout.prompts, rollout.responses, micro_batch_size=MICRO
    )
    assert len(runs) == 2
    assert torch.equal(asked.values_BT, rollout.values_BT)
    assert torch.equal(asked.reference_logprobs_BT, rollout.reference_logprobs_BT)


def test_copies_of_reused_logprobs_are_still_compared_with_training(compose: Compose) -> None:
    trainer = trainer_of(compose, "always")
    rollout = trainer.generate_experience(some_rollout().prompts)
    copied = rollout._replace(logprobs_BT=rollout.logprobs_BT.clone())
    assert trainer.train_rlhf(copied).metrics[MISMATCH] == pytest.approx(ERROR, abs=1e-5)


def test_a_resting_actor_keeps_the_last_decision(compose: Compose) -> None:
    trainer = trainer_of(compose, "auto", "ppo.actor_freeze_steps=2")
    told = steps(trainer, 3)
    assert [reused for reused, _ in told] == [False, True, True]
    assert told[1][1] is None, "nothing to compare with"
    assert told[2][1] == pytest.approx(ERROR, abs=1e-5)


def test_ranks_decide_together(compose: Compose) -> None:
    class WithFarAway(Ranks):
        """The other rank's rollouts are 9 nats off on each of 13 tokens."""

        def reduce_metrics(self, metrics: Metrics) -> Metrics:
            theirs = Mean(torch.tensor(117.0), torch.tensor(13.0))
            return metrics | {n: m + theirs for n, m in metrics.items() if n == MISMATCH}

    trainer = trainer_of(compose, "auto", "ppo.ppo_epochs=1")
    trainer.engine.ranks = WithFarAway()
    told = steps(trainer, 2)
    assert [reused for reused, _ in told] == [False, False]
    assert told[0][1] == pytest.approx((9 + ERROR) / 2, abs=1e-5)


def test_a_backend_that_measures_nothing_tells_nothing(compose: Compose) -> None:
    trainer = trainer_of(compose, "auto")
    rollout: Rollout = some_rollout()
    trainer.engine.rollout = SimpleNamespace(generate=lambda *_: rollout.responses)
    assert steps(trainer, 2) == [(False, None)] * 2
