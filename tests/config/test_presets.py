"""The presets of ppo, sft, reward and dpo have the values of what they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.config.batches import batch_plans, rollout_plan
from rlhf.config.typed import to_run_config
from tests.conf_headers import read_header
from tests.conftest import Compose

CONF = Path(__file__).parents[2] / "conf"


# One row per preset, in the order of these keys.
PPO_KEYS = (
    "steps epochs rollout_batch_size mini_batch_size ppo_epochs kl_ctl kl_target cliprange "
    "cliprange_value gamma lam whiten_advantages whiten_rewards value_coef actor_lr critic_lr "
    "lr_schedule warmup_steps weight_decay ema_beta"
).split()
# fmt: off
PPO: dict[str, tuple[Any, ...]] = {
    "deepspeed_chat": (None, 1, 32, 32, 1, 0.1, None, 0.2, 0.2, 1, 0.95, False, False, 1,
                       9.65e-6, 5e-6, "cosine", 100, 0, 0.992),
    "instructgpt": (500, None, 512, 64, 1, 0.02, None, 0.2, 0.2, 1, 0.95, None, False, 1,
                    9.65e-6, 9e-6, "constant", 80, 0, 0.992),
    "llama2_chat": (400, None, 512, 64, 1, 0.01, None, 0.2, 0.2, 1, 0.95, None, False, 1,
                    1e-6, 1e-6, "constant", 0, 0.1, 0),
    "qwen_chat": (None, 1, 128, 64, 2, 0.04, None, 0.2, 0.15, 1, 0.95, None, False, 1,
                  1e-6, 5e-6, "cosine", 10, 0, 0),
    "ppo_max": (1000, None, 128, 32, 1, 0.05, None, 0.2, 0.2, 1, 0.95, False, False, 1,
                5e-7, 1.65e-6, "inverse_sqrt", 400, 0, 0),
    "n_plus_tldr": (1953, None, 512, 512, 4, 0.05, None, 0.2, 0.2, 1, 0.95, True, False, 0.1,
                    3e-6, 3e-6, "linear", 0, 0, 0),
    "ziegler": (1953, None, 512, 512, 4, 0.15, 6, 0.2, 0.2, 1, 0.95, True, True, 0.1,
                1e-5, 1e-5, "linear", 0, 0, 0),
    "trlx_hh": (156, None, 448, 28, 4, 0.05, 6, 0.2, 0.2, 1, 0.95, True, False, 1,
                8e-6, 8e-6, "constant", 0, 1e-6, 0),
    "trl": (None, 3, 64, 64, 4, 0.05, None, 0.2, 0.2, 1, 0.95, True, False, 0.1,
            3e-6, 3e-6, "linear", 0, 0, 0),
    "openrlhf": (None, 1, 1024, 128, 1, 0.01, None, 0.2, 0.5, 1, 1, None, False, 1,
                 1e-6, 9e-6, "cosine", 10, 0, 0),
    "verl": (None, 30, 1024, 256, 1, 0, None, 0.2, 0.5, 1, 1, None, False, 1,
             1e-6, 1e-5, "constant", 0, 0.01, 0),
    "vapo": (None, 1, 8192, 512, 1, 0, None, 0.2, None, 1, 0.95, None, False, 1,
             1e-6, 2e-6, "constant", 0, 0, 0),
    "dapo": (None, 1, 8192, 512, 1, 0, None, 0.2, None, 1, 0.85, None, False, 1,
             1e-6, None, "constant", 320, 0.1, 0),
    "dr_grpo": (None, 20, 1024, 128, 1, 0, None, 0.2, None, 1, 0.85, None, False, 1,
                1e-6, None, "constant", 0, 0, 0),
    "gspo": (None, 1, 512, 128, 1, 0, None, 3e-4, None, 1, 0.85, None, False, 1,
             1e-6, None, "constant", 0, 0, 0),
    "decoupled": (None, 10, 2048, 2048, 1, 0, None, 0.2, None, 1, 0.85, True, False, 1,
                  2e-5, None, "constant", 0, 0.05, 0),
    "cispo": (None, 10, 768, 768, 1, 0, None, 0.2, None, 1, 0.85, True, False, 1,
              5e-7, None, "constant", 100, 0.01, 0),
    "deepseek_v32": (None, 1.6, 8192, 512, 1, 0.001, None, 0.2, None, 1, 0.85, None, False, 1,
                     3e-6, None, "constant", 0, 0, 0),
    "reinforce_pp_baseline": (1000, None, 1024, 1024, 1, 1e-5, None, 0.2, None, 1, 0.85, True,
                              False, 1, 5e-7, None, "cosine", 10, 0, 0),
    "vcpo": (500, None, 512, 512, 1, 0, None, 0.2, None, 1, 0.85, None, False, 1,
             1e-6, None, "constant", 0, 0.1, 0),
}
# fmt: on
# What else is particular to one of them.
PPO_BESIDES: dict[str, dict[str, Any]] = {
    "deepspeed_chat": {"clip_reward_value": 5, "missing_end_penalty": 0, "min_lr_ratio": 0},
    "instructgpt": {"ptx_coef": 27.8, "ptx_batch_size": 512, "clip_reward_value": None},
    "llama2_chat": {"adam_eps": 1e-5, "beta2": 0.95, "scale_reward": "running"},
    "qwen_chat": {"actor_freeze_steps": 50, "responses_per_prompt": 2, "scale_reward": "running"},
    "ppo_max": {"clip_reward_value": 0.8, "scale_reward": "running", "scale_reward_shift": True},
    "n_plus_tldr": {"missing_end_score": -1, "adam_eps": 1e-5, "clip_reward_value": None},
    "ziegler": {"missing_end_score": -1, "kl_horizon": 10000, "scale_reward": "reference"},
    "trlx_hh": {"clip_reward_value": 10, "shared_trunk": True, "num_layers_unfrozen": 2},
    "trl": {"kl_estimator": "k1", "missing_end_penalty": 0, "missing_end_score": None},
    "openrlhf": {"clip_reward_value": 10, "min_lr_ratio": 0.1},
    "verl": {"dual_clip": 3, "clip_reward_value": None},
    "vapo": {"lam_critic": 1, "lam_length_alpha": 0.05, "actor_freeze_steps": 50},
    "dapo": {"resampling_rounds": 9, "cliprange_high": 0.28, "advantage_estimator": "grpo"},
    "dr_grpo": {
        "advantage_estimator": "dr_grpo",
        "loss_aggregation": "fixed_length",
        "missing_end_score": 0,
    },
    "gspo": {"surrogate": "gspo", "cliprange_high": 4e-4, "loss_aggregation": "sequence_mean"},
    "decoupled": {"rollout_correction": "token", "rollout_correction_mode": "mask"},
    "cispo": {"surrogate": "cispo", "cliprange_high": 4, "advantage_estimator": "dr_grpo"},
    "deepseek_v32": {
        "kl_estimator": "k3_ratio",
        "off_policy_mask_kl": 0.5,
        "reference_every": 25,
        "reference_share": 1,
    },
    "reinforce_pp_baseline": {"kl_placement": "loss", "kl_estimator": "k2", "beta2": 0.95},
    "vcpo": {"rollout_correction": "sequence", "rollout_correction_lr": True},
}
# Epochs, batch size, learning rate, warm-up, weight decay.
LEARNING: dict[str, tuple[float, ...]] = {
    "sft=deepspeed_chat": (16, 64, 9.65e-6, 0, 0),
    "sft=instructgpt": (16, 32, 9.65e-6, 0, 0),
    "sft=llama2_chat": (2, 64, 2e-5, 0, 0.1),
    "sft=qwen_chat": (1, 128, 2e-6, 1430, 0.1),
    "sft=ppo_max": (2, 1024, 9.5e-6, 30, 0.01),
    "sft=n_plus_tldr": (1, 128, 3e-6, 0, 0),
    "sft=openrlhf": (2, 128, 5e-6, 30, 0.01),
    "sft=trl": (3, 32, 2e-5, 0, 0),
    "reward=deepspeed_chat": (1, 32, 5e-5, 0, 0.1),
    "reward=instructgpt": (1, 64, 9e-6, 0, 0),
    "reward=llama2_chat": (1, 512, 1e-5, 5, 0.1),
    "reward=qwen_chat": (1, 64, 3e-6, 20, 0.01),
    "reward=ppo_max": (1.06, 128, 5e-6, 100, 0.01),
    "reward=n_plus_tldr": (1, 64, 3e-6, 0, 0),
    "reward=ziegler": (1, 32, 5e-5, 20, 0.01),
    "reward=openrlhf": (1, 128, 9e-6, 20, 0.01),
    "reward=trl": (3, 32, 1e-4, 0, 0),
    "dpo=deepspeed_chat": (1, 32, 5e-5, 0, 0.1),
    "dpo=n_plus_tldr": (1, 64, 3e-6, 0, 0),
    "dpo=openrlhf": (1, 128, 1e-5, 20, 0),
    "dpo=trl": (3, 32, 1e-6, 0, 0),
}


def options_of(group: str) -> set[str]:
    """Presets of a group: its options but the default."""
    return {path.stem for path in (CONF / group).glob("*.yaml")} - {"default"}


def test_every_preset_has_its_row() -> None:
    assert options_of("ppo") == set(PPO) == set(PPO_BESIDES)
    for group in ("sft", "reward", "dpo"):
        assert {f"{group}={option}" for option in options_of(group)} == {
            preset for preset in LEARNING if preset.startswith(f"{group}=")
        }


@pytest.mark.slow
@pytest.mark.parametrize("name", PPO)
def test_ppo_preset(name: str, compose: Compose) -> None:
    gpus = 7 if name == "trlx_hh" else 8  # whose eighth has the reward model
    machine = ["hardware=8xa100_80g", f"hardware.ranks_per_node={gpus}"]
    machine += [f"{phase}.batch_size={4 * gpus}" for phase in ("sft", "reward")]
    composed = compose([f"ppo={name}", *machine, "model=opt_125m"])
    expected = dict(zip(PPO_KEYS, PPO[name], strict=True)) | PPO_BESIDES[name]
    if expected["critic_lr"] is None:  # without a critic
        del expected["critic_lr"]
    assert {key: composed.ppo[key] for key in expected} == expected
    config = to_run_config(composed)
    assert rollout_plan(config).per_rank * gpus == expected["rollout_batch_size"]
    mini_batch = batch_plans(config)[config.phase.order[-1]].per_rank * gpus
    assert mini_batch == expected["mini_batch_size"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", LEARNING)
def test_learning_preset(preset: str, compose: Compose) -> None:
    group, _, _ = preset.partition("=")
    phase = "phase=pipeline_dpo" if group == "dpo" else "phase=pipeline"
    composed = compose([preset, phase, "hardware=8xa100_80g", "model=opt_125m"])
    to_run_config(composed)
    keys = ("epochs", "batch_size", "lr", "warmup_steps", "weight_decay")
    assert tuple(composed[group][key] for key in keys) == LEARNING[preset]
    if group == "reward":  # published reward models learn from end scores, but DeepSpeed-Chat's
        loss = "from_divergence" if preset == "reward=deepspeed_chat" else "end"
        assert composed.reward.loss == loss


def test_losses_of_deepspeed_chat(compose: Compose) -> None:
    config = compose(["sft=deepspeed_chat", "reward=deepspeed_chat", "dpo=deepspeed_chat"])
    assert config.sft.loss_on == "all"
    assert (config.reward.loss, config.reward.group_pairs) == ("from_divergence", False)
    assert (config.dpo.beta, config.dpo.label_smoothing) == (0.1, 0)


def test_every_preset_names_its_source() -> None:
    for group in ("ppo", "sft", "reward", "dpo"):
        for name in options_of(group):
            path = CONF / group / f"{name}.yaml"
            lines, source = path.read_text().splitlines(), read_header(path).source
            assert "https://" in str(source), path
            assert f"defaults: [/base/{group}@_here_, _self_]" in lines, path
