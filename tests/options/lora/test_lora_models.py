"""Which models have adapters, and how fast these learn."""

from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from rlhf.config.roles import Role
from rlhf.engine.settings import optimizer_settings
from rlhf.options.lora.keys import LoraRole
from rlhf.options.lora.models import LORA_ROLES, find_lora_settings
from tests.conftest import Compose


def test_each_role_has_its_adapters(compose: Compose) -> None:
    overrides = ["model=opt_125m", "lora=all", "lora.rank=8", "lora.critic_rank=4", "lora.lr=0.5"]
    overrides += ["lora.critic_lr=0.25", "lora.alpha=2", "lora.dropout=0.1", "lora.train_rest=true"]
    config = to_run_config(compose([*overrides, "lora.target_modules=[q_proj]"]))
    lora = config.lora
    specs = {each: find_lora_settings(lora, role) for role, each in LORA_ROLES.items()}
    assert {role.value: spec.rank for role, spec in specs.items() if spec} == {
        "sft": 8,
        "reward": 8,
        "actor": 8,
        "critic": 4,
    }
    actor = specs[LoraRole.actor]
    assert (actor.alpha, actor.dropout, actor.train_rest) == (2, 0.1, True)
    assert actor.target_modules == ["q_proj"]
    changed = {
        each.value: optimizer_settings(config, config.sft, Phase.ppo, role, total_steps=1)
        for role, each in LORA_ROLES.items()
    }
    assert {role: each.lr_of("a.lora_A.default.weight") for role, each in changed.items()} == {
        "sft": 0.5,
        "reward": 0.5,
        "actor": 0.5,
        "critic": 0.25,
    }
    assert {each.lr_of("a.weight") for each in changed.values()} == {None}


def test_only_the_roles_that_are_named_have_adapters(compose: Compose) -> None:
    for words, roles in ((["lora=default", "lora.roles=[critic]"], [Role.critic]), ([], [])):
        lora = to_run_config(compose(words)).lora
        assert [role for role in Role if find_lora_settings(lora, role)] == roles
