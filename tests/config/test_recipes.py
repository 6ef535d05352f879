"""The experiments are the scripts and tables that they name."""

from pathlib import Path
from typing import Any

import pytest

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.batches import batch_plans, num_ranks, rollout_plan
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import to_run_config
from rlhf.options.lora.keys import LoraRole
from tests.config.test_compose import check_experiment
from tests.conftest import Compose

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
EXPERIMENTS = sorted(
    path.relative_to(CONF / "experiment").with_suffix("").as_posix()
    for path in (CONF / "experiment").rglob("*.yaml")
)
OPT = "facebook/opt-"


RECIPES = read_yaml_beside(__file__, "recipes.yaml")
SCRIPTS: dict[str, dict[str, Any]] = RECIPES["pipeline"]
SPLIT = {"sft": 2, "reward": 4, "ppo": 4}


def test_every_script_has_its_experiment() -> None:
    named = {name for name in EXPERIMENTS if name.startswith("dsc/")}
    assert named == {*SCRIPTS, *RECIPES["dpo"], "dsc/chinese", "dsc/japanese"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_pipeline_is_that_of_the_scripts(name: str, compose: Compose) -> None:
    script = SCRIPTS[name]
    config = to_run_config(compose([f"experiment={name}"]))
    check_experiment(name, config)
    sft, reward, ppo, rollout = config.sft, config.reward, config.ppo, config.rollout
    llama = ("meta-llama/Llama-2-7b-hf",) * 2
    paths = llama if script["model"] == "llama" else (OPT + script["model"], OPT + "350m")
    assert (config.model.path, config.reward_model.path) == paths
    assert num_ranks(config) == script["gpus"]
    plans = [batch_plans(config)[phase] for phase in config.phase.order]
    assert [[plan.micro, plan.accumulation] for plan in plans] == script["batches"]
    assert rollout_plan(config).mini_batches == ppo.ppo_epochs == 1
    assert [sft.lr, reward.lr, ppo.actor_lr, ppo.critic_lr] == script["lrs"]
    assert [sft.weight_decay, reward.weight_decay, ppo.weight_decay] == script["decays"]
    assert (sft.warmup_steps, reward.warmup_steps, ppo.warmup_steps) == (0, 0, 100)
    assert (sft.epochs, reward.epochs) == (script["epochs"], 1)
    assert (ppo.epochs, ppo.steps) == (1, None)
    assert ppo.ema_beta == (0.992 if name == "dsc/opt_1.3b" else 0)
    assert config.zero.stage == max(script["stage"], 1)  # fp16 needs its masters
    assert (sft.max_tokens, reward.max_tokens) == (512, 512)
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens) == (256, 256)
    assert (config.seed, config.data.split) == (1234, [2, 4, 4])
    assert config.zero.quantize_frozen_weights is name.endswith("mixz")
    check_adapters(config, *script.get("lora", (0, 0)))
    check_data(config, *script.get("blend", ([], 0)))


def check_adapters(config: RunConfig, actor: int, critic: int) -> None:
    lora = config.lora
    critic_rank = lora.rank if lora.critic_rank is None else lora.critic_rank
    assert lora.rank == actor
    if actor:
        assert (lora.alpha, lora.lr) == (1, 5e-4)
        assert {LoraRole.sft, LoraRole.actor} <= {*lora.roles}
        assert (critic_rank if LoraRole.critic in lora.roles else 0) == critic
        assert lora.train_rest


def check_data(config: RunConfig, phases: list[str], weight: float) -> None:
    """The other sets' part of each of their phases is what a split of 2:4:4 of them would be."""
    sets = dict(config.data.sets)
    rm_static = sets.pop("rm_static")
    assert (rm_static.phases, rm_static.weight) == (None, 1)
    names = {"full_hh_rlhf", "synthetic_instruct", "rlhf_reward_datasets"} if phases else set()
    assert set(sets) == names
    assert all((s.phases, s.weight) == (phases, weight) for s in sets.values())
    assert weight == pytest.approx(sum(SPLIT[phase] for phase in phases) / sum(SPLIT.values()))


@pytest.mark.parametrize("name", RECIPES["dpo"])
def test_dpo_is_that_of_the_script(name: str, compose: Compose) -> None:
    gpus, micro, accumulation, lr, stage, rank = RECIPES["dpo"][name]
    config = to_run_config(compose([f"experiment={name}"]))
    check_experiment(name, config)
    plan = batch_plans(config)[Phase.dpo]
    assert num_ranks(config) == gpus
    assert (plan.micro, plan.accumulation) == (micro, accumulation)
    assert (config.dpo.lr, config.dpo.weight_decay, config.dpo.beta) == (lr, 0.1, 0.1)
    assert (config.zero.stage, config.lora.rank) == (max(stage, 1), rank)
    assert config.zero.offload_parameters == ("llama2" in name)


@pytest.mark.parametrize(
    ("name", "model"),
    [("dsc/chinese", "bigscience/bloom-1b1"), ("dsc/japanese", "ai-forever/mGPT")],
)
def test_other_languages_are_fine_tuned_only(name: str, model: str, compose: Compose) -> None:
    config = to_run_config(compose([f"experiment={name}"]))
    check_experiment(name, config)
    plan = batch_plans(config)
    assert list(plan) == [Phase.sft]
    assert (num_ranks(config), plan[Phase.sft].micro, config.model.path) == (8, 8, model)
    assert config.data.split == [10, 0, 0]


@pytest.mark.parametrize(
    ("name", "model", "gpus", "rollout", "data"),
    [
        ("tables/table4", "13b", 8, 1024, "deepspeed_chat_benchmark"),
        ("tables/table5", "66b", 64, 1024, "deepspeed_chat_benchmark"),
        ("tables/table6", "1.3b", 1, 32, "rm_static"),
    ],
)
def test_tables_are_those_of_the_announcement(
    name: str, model: str, gpus: int, rollout: int, data: str, compose: Compose
) -> None:
    config = to_run_config(compose([f"experiment={name}"]))
    assert (config.model.path, config.reward_model.path) == (OPT + model, OPT + "350m")
    assert (num_ranks(config), config.ppo.rollout_batch_size) == (gpus, rollout)
    assert rollout_plan(config).mini_batches == 1
    assert to_run_config(compose([f"data={data}"])).data.sets == config.data.sets
