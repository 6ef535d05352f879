"""Which models a phase holds, and how much of them learns; by hand and beside real models."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from rlhf.config.choices import ModelInit, Phase
from rlhf.config.schema.run import RunConfig
from rlhf.models.build import ModelSource, build_actor, build_scorer
from rlhf.models.model_uses import models_in_phase
from rlhf.models.shapes import FAMILIES, UnknownModelError, shape_of
from rlhf.options.trunk.shared_trunk import SharedTrunk
from tests.architectures import sizes
from tests.conftest import Compose
from tests.lora_settings import adding, lora_config
from tests.models_on_disk import small_tokenizer
from tests.plan.planned import TINY_MODEL, changed, named, run_of

# A layer of TINY_MODEL has 768 matrix weights and 9 * 8 + 32 = 104 others; outside are 100 * 8
# embeddings, 32 * 8 positions and 16 of the last norm.
LAYER, MATRICES = 872, 2 * 768
WEIGHTS = 2 * LAYER + 800 + 256 + 16
SCORER = WEIGHTS + 8
SIDES = 2 * (4 * 16 + 2 * 40)  # inputs and outputs of all adapted layers


def tiny_opt(compose: Compose, **groups: dict[str, Any]) -> RunConfig:
    """Everything from tiny OPTs."""
    return changed(
        run_of(compose, "model=opt_125m"), **{"model": {"architecture": TINY_MODEL}, **groups}
    )


def found(config: RunConfig, phase: Phase) -> dict[str, tuple[int, int, int]]:
    """Weights, those that learn, those of adapters, by role."""
    uses = named(models_in_phase(config, phase))
    return {role: (u.weights, u.trained, u.extra_weights) for role, u in uses.items()}


def test_without_adapters(compose: Compose) -> None:
    config = tiny_opt(compose)
    assert found(config, Phase.sft) == {"sft": (WEIGHTS, WEIGHTS, 0)}
    assert found(config, Phase.reward) == {"reward_training": (SCORER, SCORER, 0)}
    assert found(config, Phase.dpo) == {
        "actor": (WEIGHTS, WEIGHTS, 0),
        "reference": (WEIGHTS, 0, 0),
    }
    assert found(config, Phase.ppo) == {
        "actor": (WEIGHTS, WEIGHTS, 0),
        "critic": (SCORER, SCORER, 0),
        "reference": (WEIGHTS, 0, 0),
        "reward": (SCORER, 0, 0),
    }


def test_adapters_are_trained_alone_and_make_the_reference_needless(compose: Compose) -> None:
    rank16 = 16 * SIDES
    assert found(tiny_opt(compose, lora={"rank": 16}), Phase.ppo) == {
        "actor": (WEIGHTS + rank16, rank16, rank16),
        "critic": (SCORER + rank16, rank16 + 8, rank16),  # and its head
        "reward": (SCORER, 0, 0),
    }
    assert found(tiny_opt(compose, lora={"rank": 16}), Phase.dpo) == {
        "actor": (WEIGHTS + rank16, rank16, rank16)
    }
    assert found(tiny_opt(compose, lora={"rank": 16}), Phase.sft) == {"sft": (WEIGHTS, WEIGHTS, 0)}


def test_train_rest_trains_all_but_the_matrices_below_adapters(compose: Compose) -> None:
    config = tiny_opt(compose, lora={"rank": 2, "train_rest": True})
    adapters = 2 * SIDES
    assert found(config, Phase.ppo) == {
        "actor": (WEIGHTS + adapters, adapters + WEIGHTS - MATRICES, adapters),
        "critic": (SCORER + adapters, adapters + SCORER - MATRICES, adapters),
        "reference": (WEIGHTS, 0, 0),  # the rest has learned too
        "reward": (SCORER, 0, 0),
    }


@pytest.mark.parametrize("is_scorer", [False, True])
@pytest.mark.parametrize("train_rest", [False, True])
def test_the_same_numbers_as_a_real_model(
    is_scorer: bool, train_rest: bool, compose: Compose
) -> None:
    tokenizer = small_tokenizer()
    fields = TINY_MODEL | {"vocab_size": len(tokenizer), "word_embed_proj_dim": 4}
    spec = lora_config(alpha=1.0, train_rest=train_rest)
    source = ModelSource(key="model", path=None, architecture=fields)
    build = build_scorer if is_scorer else build_actor
    module = build(source, tokenizer, seed=1, extensions=adding(spec))
    lora = {"rank": 2, "train_rest": train_rest}
    config = tiny_opt(compose, model={"architecture": fields}, lora=lora)
    model = named(models_in_phase(config, Phase.ppo))["critic" if is_scorer else "actor"]
    assert model.weights == sum(p.numel() for p in module.parameters())
    assert model.trained == sum(p.numel() for p in module.parameters() if p.requires_grad)


def test_the_reward_model_may_be_another(compose: Compose) -> None:
    small = TINY_MODEL | {"num_hidden_layers": 1}
    own = {"init": ModelInit.pretrained, "path": "a/b", "architecture": small}
    config = tiny_opt(compose, reward_model=own)
    assert found(config, Phase.reward) == {"reward_training": (SCORER - LAYER,) * 2 + (0,)}
    ppo = found(config, Phase.ppo)
    assert ppo["reward"][0] == ppo["critic"][0] == SCORER - LAYER
    assert ppo["reference"][0] == WEIGHTS


TRUNKS = {
    "opt": TINY_MODEL | {"num_hidden_layers": 4},
    "llama": sizes("llama", 8, 12, layers=4, vocab_size=100, max_position_embeddings=64),
}


@pytest.mark.parametrize("family", TRUNKS)
@pytest.mark.parametrize(("unfrozen", "value"), [(1, 0), (3, 2)])
def test_a_shared_trunk_is_counted_as_it_is_built(
    family: str, unfrozen: int, value: int, compose: Compose
) -> None:
    tokenizer = small_tokenizer()
    fields = TRUNKS[family] | {"vocab_size": len(tokenizer)}
    source = ModelSource(key="model", path=None, architecture=fields)
    branches = {"num_layers_unfrozen": unfrozen, "num_value_layers": value}
    trunk = SharedTrunk(build_actor(source, tokenizer, seed=1), **branches)
    config = tiny_opt(
        compose, model={"architecture": fields}, ppo={"shared_trunk": True, **branches}
    )
    uses = named(models_in_phase(config, Phase.ppo))
    assert list(uses) == ["actor", "reward"]
    assert uses["actor"].weights == sum(p.numel() for p in trunk.parameters())
    learning = sum(p.numel() for p in trunk.parameters() if p.requires_grad)
    assert uses["actor"].trained == learning


@pytest.mark.parametrize(("asked", "layers"), [(False, 0), (True, 2), (1, 1), (7, 2)])
def test_layers_that_are_computed_again(asked: bool | int, layers: int, compose: Compose) -> None:
    model = {"architecture": TINY_MODEL, "gradient_checkpointing": asked}
    uses = named(models_in_phase(tiny_opt(compose, model=model), Phase.ppo))
    found = {role: use.checkpointed for role, use in uses.items()}
    assert found == {"actor": layers, "critic": 0, "reference": 0, "reward": 0}
    config = tiny_opt(compose, reward_model={"gradient_checkpointing": asked})
    assert named(models_in_phase(config, Phase.ppo))["critic"].checkpointed == layers


def test_the_moving_average_is_the_actors_in_ppo(compose: Compose) -> None:
    def averaged(phase: Phase, beta: float = 0.99) -> list[str]:
        uses = models_in_phase(tiny_opt(compose, ppo={"ema_beta": beta}), phase)
        return [model.role.value for model in uses if model.fp32_copies]

    assert averaged(Phase.ppo) == ["actor"]
    assert averaged(Phase.sft) == averaged(Phase.ppo, beta=0.0) == []
    order = {"order": [Phase.sft, Phase.dpo]}
    dpo = models_in_phase(tiny_opt(compose, ppo={"ema_beta": 0.99}, phase=order), Phase.dpo)
    assert not any(model.fp32_copies for model in dpo)


def test_an_unknown_model_is_named(compose: Compose) -> None:
    unknown = {"init": ModelInit.pretrained, "path": "a/b", "architecture": {}}
    with pytest.raises(UnknownModelError, match=r"^model\.path=a/b .* model\.architecture"):
        models_in_phase(tiny_opt(compose, model=unknown), Phase.sft)
    with pytest.raises(UnknownModelError, match=r"^reward_model\.path=a/b"):
        models_in_phase(tiny_opt(compose, reward_model=unknown), Phase.ppo)
    mamba = {"architecture": {"model_type": "mamba"}, "init": ModelInit.random, "path": None}
    with pytest.raises(UnknownModelError, match=r"know model_type=mamba of model\.architecture"):
        models_in_phase(tiny_opt(compose, model=mamba), Phase.sft)


@pytest.mark.parametrize(
    "family", sorted(FAMILIES.keys() - {"gpt2"})
)  # whose sizes have other names
def test_fields_that_a_config_lacks_have_the_values_of_its_family(family: str) -> None:
    """Such as 32 key heads and 128 numbers per head in Qwen3, however many heads it has."""
    few = {"model_type": family, "hidden_size": 192, "num_attention_heads": 32, "vocab_size": 99}
    few |= {"num_hidden_layers": 2, "intermediate_size": 64, "ffn_dim": 64}
    whole = AutoConfig.for_model(**few).to_dict()
    shapes = [
        shape_of(SimpleNamespace(init=ModelInit.random, path=None, architecture=x, vocab_size=0))
        for x in (few, whole)
    ]
    assert shapes[0] == shapes[1]
