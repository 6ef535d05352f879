"""Which models PPO builds, from what, and what each is given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.base.errors import ConfigError
from rlhf.base.ranks import Ranks
from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from rlhf.config.roles import Role
from rlhf.models.model_uses import models_in_phase
from rlhf.options.lora.models import AdapterOff
from rlhf.phases.ppo import rlhf_engine
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.phases.shared.scoring import JudgeScores
from tests.conftest import Compose
from tests.models_on_disk import save_models
from tests.plain_engine import PlainEngine


class NotedEngine(PlainEngine):
    """Keeps what it was made with."""

    def __init__(self, module: torch.nn.Module, **given: Any) -> None:
        super().__init__(module)
        self.given = given


Built = Callable[..., RLHFEngine]


@pytest.fixture
def built(compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """An RLHFEngine over models on disk, without training engines."""
    monkeypatch.setattr(rlhf_engine, "build_engine", NotedEngine)
    save_models(tmp_path, policy="some words", reward="some words")

    def engine(*overrides: str) -> RLHFEngine:
        paths = ["phase=ppo", "model=pretrained", "model@reward_model=pretrained"]
        paths += ["data.template=plain"]
        paths += [f"model.path={tmp_path / 'policy'}", f"reward_model.path={tmp_path / 'reward'}"]
        return RLHFEngine(to_run_config(compose([*paths, *overrides])), Ranks())

    return engine


def test_a_run_without_ppo_has_no_engine(built: Built) -> None:
    with pytest.raises(ConfigError, match="the run trains sft without ppo"):
        built("phase=sft")


def test_as_many_responses_are_sampled_at_once_as_a_step_has(built: Built) -> None:
    """Also by an evaluation, whatever the micro-batches of scoring and training."""
    sizes = [f"ppo.{name}=12" for name in ("rollout_batch_size", "mini_batch_size")]
    engine = built(*sizes, "ppo.micro_batch_size=4")
    for backend in (engine.rollout, engine.policy.sampling, engine.policy.greedy):
        assert backend.settings.max_rows == 12


def test_actor_and_reference_start_equal_and_so_do_critic_and_reward(built: Built) -> None:
    engine = built()
    roles = [engine.actor, engine.models.reference, engine.critic, engine.scores.model]
    assert [e.given["role"] for e in roles] == [
        Role.actor,
        Role.reference,
        Role.critic,
        Role.reward,
    ]
    assert [e.given["optimizer"] is not None for e in roles] == [True, False, True, False]
    states = [e.module.state_dict() for e in roles]
    for one, other in (states[:2], states[2:]):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_judge_takes_the_place_of_the_reward_model(built: Built) -> None:
    engine = built("model@reward_model=gold", "reward_model.path=null")
    assert [e.given["role"] for e in engine._engines] == [Role.actor, Role.reference, Role.critic]
    assert isinstance(engine.scores, JudgeScores)
    actor, critic = (e.module.pretrained.base_model for e in (engine.actor, engine.critic))
    weights = critic.state_dict()
    assert all(torch.equal(one, weights[name]) for name, one in actor.state_dict().items())


def dropouts(engine: Any) -> float:
    model = getattr(engine.module, "pretrained", engine.module)
    return float(model.config.attention_dropout)


def test_actor_and_critic_have_dropout_of_their_own(built: Built) -> None:
    engine = built("ppo.actor_dropout=0.25", "ppo.critic_dropout=0.5", "model.dropout=0.75")
    assert (dropouts(engine.actor), dropouts(engine.critic)) == (0.25, 0.5)
    assert (dropouts(engine.models.reference), dropouts(engine.scores.model)) == (0.0, 0.0)


@pytest.mark.parametrize("key", ["model", "reward_model"])
def test_actor_and_critic_keep_activations_or_not(key: str, built: Built) -> None:
    engine = built(f"{key}.gradient_checkpointing=true")
    models = (engine.actor.module, engine.critic.module)
    got = [any(getattr(m, "gradient_checkpointing", False) for m in x.modules()) for x in models]
    assert got == [key == "model", key == "reward_model"]


def test_with_adapters_the_reference_is_the_actor_without_them(built: Built) -> None:
    assert isinstance(built("lora=default").models.reference, AdapterOff)
    both_learn = built("lora=default", "lora.train_rest=true")
    assert both_learn.models.reference.given["role"] is Role.reference


def test_a_teacher_takes_the_place_of_the_reference(built: Built, tmp_path: Path) -> None:
    save_models(tmp_path / "other", policy="some words", reward="some words")
    teacher = tmp_path / "other" / "policy"
    (weights,) = teacher.glob("*.safetensors")
    expected = {name: 2 * tensor for name, tensor in load_file(weights).items()}
    save_file(expected, weights, metadata={"format": "pt"})
    for adapters in ("none", "default"):  # whose reference is otherwise the actor itself
        engine = built(f"ppo.teacher_path={teacher}", f"lora={adapters}")
        state = engine.models.reference.module.pretrained.state_dict()
        assert expected.keys() <= state.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        uses = {use.role: use for use in models_in_phase(engine.config, Phase.ppo)}
        assert Role.reference in uses, "the plan counts it"


def test_a_step_of_the_actor_takes_in_the_corpus(built: Built) -> None:
    sizes = ["ppo.mini_batch_size=64", "ppo.micro_batch_size=16"]
    engine = built(*sizes, "ppo.ptx_coef=1", "ppo.ptx_batch_size=32")
    assert engine.critic.given["plan"].accumulation == 4
    assert engine.actor.given["plan"].accumulation == 4 + 2


def test_without_values_there_is_no_critic(built: Built) -> None:
    assert built("ppo.advantage_estimator=reinforce_pp").critic is None


def test_a_rank_gets_its_share_of_repeated_prompts_with_draws_of_their_step(built: Built) -> None:
    engine = built("ppo.responses_per_prompt=2")
    engine.ranks = Ranks(1, 2)
    batch, later = (engine.prompts(["some", "words"], step=step) for step in (0, 1))
    assert batch.texts == ["words", "words"]
    assert not torch.equal(batch.draws_BT, later.draws_BT)
