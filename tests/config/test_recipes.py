"""The experiments are the scripts and tables that they name."""

from pathlib import Path

import pytest

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


# What DeepSpeed-Chat's scripts of steps 1, 2 and 3 say. Model, GPUs; for each step sequences (or
# pairs) per device and accumulation; learning rates of SFT, reward model, actor and critic; weight
# decay of the same (step 3 has one for both); ZeRO stage of step 3.
# fmt: off
SCRIPTS = {
    "dsc/opt_1.3b_single_gpu": (
        "1.3b", 1, ((16, 8), (16, 4), (16, 2)), (1e-3, 5e-5, 9.65e-6, 5e-6), (0, 0.1, 0), 0),
    "dsc/opt_6.7b_lora_single_gpu": (
        "6.7b", 1, ((8, 16), (16, 4), (8, 16)), (1e-3, 5e-5, 5e-4, 5e-6), (0, 0.1, 0), 0),
    "dsc/opt_1.3b": (
        "1.3b", 8, ((8, 1), (4, 1), (4, 1)), (9.65e-6, 5e-5, 9.65e-6, 5e-6), (0, 0.1, 0), 2),
    "dsc/opt_1.3b_lora": (
        "1.3b", 8, ((8, 1), (4, 1), (4, 1)), (1e-3, 5e-5, 9.65e-6, 5e-6), (0.1, 0.1, 0), 2),
    "dsc/opt_6.7b": (
        "6.7b", 8, ((6, 1), (4, 1), (4, 1)), (9.65e-6, 5e-5, 9.65e-6, 5e-6), (0, 0.1, 0.1), 3),
    "dsc/opt_13b": (
        "13b", 8, ((4, 1), (4, 1), (16, 1)), (1e-4, 5e-5, 5e-4, 5e-6), (0, 0.1, 0), 3),
    "dsc/opt_30b_lora": (
        "30b", 8, ((4, 1), (4, 1), (4, 1)), (9.65e-6, 5e-5, 5e-4, 5e-6), (0, 0.1, 0), 3),
    "dsc/opt_66b": (
        "66b", 64, ((4, 1), (2, 1), (4, 1)), (1e-4, 5e-5, 5e-4, 5e-6), (0.1, 0.1, 0.1), 3),
    **dict.fromkeys(("dsc/llama2_7b", "dsc/llama2_7b_lora", "dsc/llama2_7b_mixz"), (
        "llama", 8, ((4, 1), (8, 1), (1, 1)), (9.65e-6, 9.65e-6, 9.65e-6, 5e-6), (0, 0.1, 0.1), 3)),
}
# fmt: on
EPOCHS = {  # of SFT; the others have 16
    "dsc/opt_1.3b_single_gpu": 1,
    "dsc/opt_66b": 2,
    "dsc/llama2_7b": 4,
    "dsc/llama2_7b_lora": 4,
    "dsc/llama2_7b_mixz": 4,
}
LORA = {  # rank of actor and critic; the others have no adapters
    **{f"dsc/opt_{name}_lora": (128, 0) for name in ("1.3b", "30b")},
    **{f"dsc/opt_{name}": (128, 0) for name in ("1.3b_single_gpu", "13b", "66b")},
    "dsc/opt_6.7b_lora_single_gpu": (128, 0),
    **{f"dsc/llama2_7b_{name}": (64, 64) for name in ("lora", "mixz")},
}
# Phases of the data sets that are not rm-static, and the weight that makes their part of each phase
# what a split of 2:4:4 would; the others learn from rm-static alone.
BLENDS = {
    **dict.fromkeys(SCRIPTS, ("sft reward", 0.6)),
    **dict.fromkeys((name for name in SCRIPTS if "llama2" in name), ("sft", 0.2)),
    "dsc/opt_6.7b_lora_single_gpu": ("sft", 0.2),
    "dsc/opt_1.3b_single_gpu": None,  # rm-static alone
}
DPO_SCRIPTS = {  # GPUs, pairs per device, accumulation, learning rate, ZeRO stage, rank
    "dsc/dpo_opt_350m_single_gpu": (1, 16, 4, 1e-3, 0, 0),
    "dsc/dpo_opt_350m": (8, 4, 1, 5e-5, 0, 0),
    "dsc/dpo_opt_350m_multi_node": (64, 2, 1, 5e-5, 0, 0),
    "dsc/dpo_llama2_7b": (8, 8, 1, 9.65e-6, 3, 0),
    "dsc/dpo_llama2_7b_lora": (8, 8, 1, 9.65e-6, 3, 128),
}


def test_every_script_has_its_experiment() -> None:
    named = {name for name in EXPERIMENTS if name.startswith("dsc/")}
    assert named == {*SCRIPTS, *DPO_SCRIPTS, "dsc/chinese", "dsc/japanese"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_pipeline_is_that_of_the_scripts(name: str, compose: Compose) -> None:
    model, gpus, batches, lrs, decays, stage = SCRIPTS[name]
    config = to_run_config(compose([f"experiment={name}"]))
    check_experiment(name, config)
    sft, reward, ppo, rollout = config.sft, config.reward, config.ppo, config.rollout
    llama = "meta-llama/Llama-2-7b-hf"
    paths = (llama, llama) if model == "llama" else (OPT + model, OPT + "350m")
    assert (config.model.path, config.reward_model.path) == paths
    assert num_ranks(config) == gpus
    plans = batch_plans(config)
    assert [(plans[p].micro, plans[p].accumulation) for p in config.phase.order] == [*batches]
    assert rollout_plan(config).mini_batches == ppo.ppo_epochs == 1
    assert (sft.lr, reward.lr, ppo.actor_lr, ppo.critic_lr) == lrs
    assert (sft.weight_decay, reward.weight_decay, ppo.weight_decay) == decays
    assert (sft.warmup_steps, reward.warmup_steps, ppo.warmup_steps) == (0, 0, 100)
    assert (sft.epochs, reward.epochs) == (EPOCHS.get(name, 16), 1)
    assert (ppo.epochs, ppo.steps) == (1, None)
    assert ppo.ema_beta == (0.992 if name == "dsc/opt_1.3b" else 0)
    assert config.zero.stage == max(stage, 1)  # fp16 needs its masters
    assert (sft.max_tokens, reward.max_tokens) == (512, 512)
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens) == (256, 256)
    assert (config.seed, config.data.split) == (1234, [2, 4, 4])
    check_adapters(name, config)
    check_data(name, config)


def check_adapters(name: str, config: RunConfig) -> None:
    lora, (actor, critic) = config.lora, LORA.get(name, (0, 0))
    critic_rank = lora.rank if lora.critic_rank is None else lora.critic_rank
    assert lora.rank == actor
    if actor:
        assert (lora.alpha, lora.lr) == (1, 5e-4)
        assert {LoraRole.sft, LoraRole.actor} <= {*lora.roles}
        assert (critic_rank if LoraRole.critic in lora.roles else 0) == critic
        assert lora.train_rest
    assert config.zero.quantize_frozen_weights is name.endswith("mixz")


def check_data(name: str, config: RunConfig) -> None:
    sets = dict(config.data.sets)
    rm_static = sets.pop("rm_static")
    assert (rm_static.phases, rm_static.weight) == (None, 1)
    if blend := BLENDS[name]:
        phases, weight = blend
        assert set(sets) == {"full_hh_rlhf", "synthetic_instruct", "rlhf_reward_datasets"}
        assert all((s.phases, s.weight) == (phases.split(), weight) for s in sets.values())
        split = {"sft": 2, "reward": 4, "ppo": 4}
        taken = sum(split[phase] for phase in phases.split()) / sum(split.values())
        assert weight == pytest.approx(taken)
    else:
        assert not sets


@pytest.mark.parametrize("name", DPO_SCRIPTS)
def test_dpo_is_that_of_the_script(name: str, compose: Compose) -> None:
    gpus, micro, accumulation, lr, stage, rank = DPO_SCRIPTS[name]
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
