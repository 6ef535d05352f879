"""Which optimiser each phase asks for: its own rates, decay and schedule, to the last step."""

import pytest

from rlhf.config.batches import num_phase_steps
from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from rlhf.config.roles import Role
from rlhf.engine.masters import Masters
from rlhf.engine.settings import OptimizerSettings
from rlhf.phases.ppo.rlhf_engine import ppo_optimizer_settings
from tests.conftest import Compose

OWN = ["lr=0.5", "weight_decay=0.25", "beta1=0.7", "beta2=0.8", "adam_eps=1e-3"]
OWN += ["max_grad_norm=3", "warmup_steps=2", "lr_schedule=linear", "min_lr_ratio=0.1"]


def shares(settings: OptimizerSettings, steps: int) -> list[float]:
    return [settings.schedule(step) for step in range(steps)]


@pytest.mark.parametrize("phase", ["sft", "reward", "dpo"])
def test_a_phase_has_an_optimiser_of_its_own(phase: str, compose: Compose) -> None:
    config = to_run_config(compose([f"{phase}.{setting}" for setting in OWN]))
    settings = OptimizerSettings.from_config(getattr(config, phase), total_steps=7)
    assert (settings.lr, settings.weight_decay) == (0.5, 0.25)
    assert (settings.betas, settings.eps, settings.max_grad_norm) == ((0.7, 0.8), 1e-3, 3)
    # two steps of warm-up, then 1 - 0.9 * done with done = 0, 1/4, 2/4, 3/4, 1
    expected = [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]
    assert shares(settings, 7) == pytest.approx(expected)
    others = {"sft", "reward", "dpo"} - {phase}
    assert all(getattr(config, other).lr != 0.5 for other in others)


def of_ppo(compose: Compose, *overrides: str) -> tuple[OptimizerSettings, OptimizerSettings]:
    """Optimisers of actor and critic; 3 rollouts of 2 mini-batches, twice: 12 updates."""
    short = ["ppo.steps=3", "ppo.rollout_batch_size=8", "ppo.mini_batch_size=4", "ppo.ppo_epochs=2"]
    short += ["ppo.lr_schedule=linear", "ppo.min_lr_ratio=0", "ppo.warmup_steps=0"]
    config = to_run_config(compose([*short, *overrides]))
    return ppo_optimizer_settings(config, Role.actor), ppo_optimizer_settings(config, Role.critic)


def test_actor_and_critic_learn_at_rates_of_their_own(compose: Compose) -> None:
    rates = ["ppo.actor_lr=0.5", "ppo.critic_lr=0.25", "ppo.weight_decay=0.1", "ppo.ema_beta=0.9"]
    actor, critic = of_ppo(compose, *rates)
    assert (actor.lr, critic.lr) == (0.5, 0.25)
    assert (actor.weight_decay, critic.weight_decay) == (0.1, 0.1)
    assert actor.follow(Masters([], lambda: None))._beta == 0.9
    assert critic.follow is None
    for settings in (actor, critic):
        assert shares(settings, 12) == pytest.approx([1 - step / 11 for step in range(12)])


def test_keys_of_the_critic_take_the_place_of_the_shared_ones(compose: Compose) -> None:
    own = ["weight_decay=0.3", "beta1=0.6", "beta2=0.7", "warmup_steps=4", "lr_schedule=constant"]
    actor, critic = of_ppo(compose, *(f"ppo.critic_{setting}" for setting in own))
    assert (actor.weight_decay, critic.weight_decay) == (0.0, 0.3)
    assert (actor.betas, critic.betas) == ((0.9, 0.95), (0.6, 0.7))
    assert shares(actor, 12)[-1] == 0.0
    assert shares(critic, 12) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 9)
    decayed = of_ppo(compose, "ppo.critic_min_lr_ratio=0.5")
    assert [shares(settings, 12)[-1] for settings in decayed] == [0.0, 0.5]


def test_an_actor_that_rests_first_has_a_shorter_schedule(compose: Compose) -> None:
    actor, critic = of_ppo(compose, "ppo.actor_freeze_steps=1")
    assert shares(actor, 8) == pytest.approx([1 - step / 7 for step in range(8)])
    assert shares(critic, 12)[-2] == pytest.approx(1 / 11)


@pytest.mark.parametrize(
    ("steps", "epochs", "expected"),
    [(7, None, 7), (None, 1, 3), (None, 2, 5), (4, 2, 4), (9, 2, 5), (None, 0.01, 1)],
)
def test_steps_and_epochs_are_both_caps(
    steps: int | None, epochs: float | None, expected: int, compose: Compose
) -> None:
    # ten prompts by four: 2.5 rollouts in a pass
    words = ["ppo.rollout_batch_size=4", "ppo.mini_batch_size=4", "ppo.responses_per_prompt=1"]
    caps = [f"ppo.steps={steps}", f"ppo.epochs={epochs}"]
    config = to_run_config(compose([*words, *(cap.replace("None", "null") for cap in caps)]))
    assert num_phase_steps(config, Phase.ppo, examples=10) == expected


def test_a_part_of_a_pass_is_exact(compose: Compose) -> None:
    """The product of the nearest binary numbers, 1.1 * 100, is above 110."""
    config = to_run_config(compose(["sft.epochs=1.1", "sft.batch_size=10"]))
    assert num_phase_steps(config, Phase.sft, examples=100) == 11
