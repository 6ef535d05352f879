"""DeepSpeed-Chat's own test matrix for step 3, on small OPTs and two ranks.

ZeRO {2, 3} x offload {off, on} x LoRA {off, on}; each must train a step and save models that load.
Four of the eight have every pair of settings; the others are left to ``make soak``, with a run on
models as wide as OPT-125M, with two of its layers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from rlhf.data.synthetic_pairs import generate_records
from rlhf.models.build import ModelSource, build_actor, build_scorer
from rlhf.models.tokenizers import train_tokenizer
from tests.runs import ROOT, launch, metrics

pytestmark = pytest.mark.slow

VOCABULARY = 400
SHORT = [
    "phase=ppo",
    "data.size=300",
    "hardware.ranks_per_node=2",
    "model=pretrained",
    "model@reward_model=pretrained",
    "ppo.steps=1",
    "ppo.rollout_batch_size=8",
    "ppo.mini_batch_size=8",
    "ppo.ppo_epochs=1",
    "ppo.warmup_steps=0",
    "ppo.eval_prompts=4",
    "ppo.ptx_eval_blocks=0",
    "rollout.max_response_tokens=4",
]


SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_attention_heads": 4,
}


def make_models(folder: Path, **changed: int) -> Path:
    """Save a policy and a reward model of OPT-125M's shape, apart from what is ``changed``."""
    shape = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/model/opt_125m.yaml").architecture)
    assert isinstance(shape, dict)
    architecture = shape | {"vocab_size": VOCABULARY} | changed
    source = ModelSource(key="model", path=None, architecture=architecture)
    texts = [r.prompt or "" for r in generate_records(300, seed=1)]
    tokenizer = train_tokenizer(texts, vocab_size=VOCABULARY)
    build_actor(source, tokenizer, seed=1).save_pretrained(folder / "policy")
    build_scorer(source, tokenizer, seed=2).pretrained.save_pretrained(folder / "reward")
    for name in ("policy", "reward"):
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("small"), **SMALL)


PAIRWISE = {("stage2", "none"), ("stage2_offload", "default")}
PAIRWISE |= {("stage3", "default"), ("stage3_offload", "none")}


@pytest.mark.parametrize(
    ("zero", "lora"),
    [
        pytest.param(zero, lora, marks=[] if (zero, lora) in PAIRWISE else pytest.mark.soak)
        for zero in ("stage2", "stage2_offload", "stage3", "stage3_offload")
        for lora in ("none", "default")
    ],
)
def test_ppo_trains_and_saves(zero: str, lora: str, small_models: Path, tmp_path: Path) -> None:
    check_ppo(zero, lora, small_models, tmp_path)


@pytest.mark.soak
def test_ppo_trains_and_saves_wide_models(tmp_path: Path) -> None:
    check_ppo("stage3", "none", make_models(tmp_path, num_hidden_layers=2), tmp_path)


def check_ppo(zero: str, lora: str, models: Path, tmp_path: Path) -> None:
    """A step of PPO changes the saved weights, and what is saved loads."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    run_dir = tmp_path / "run"
    paths = [f"model.path={models / 'policy'}", f"reward_model.path={models / 'reward'}"]
    run = launch(*SHORT, *paths, f"zero={zero}", f"lora={lora}", f"run_dir={run_dir}", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    result = json.loads((run_dir / "result.json").read_text())["phases"]["ppo"]
    assert result["steps"] == 1
    learned = [line for line in metrics(run_dir) if "ppo/actor_grad_norm" in line]
    assert learned[0]["ppo/actor_grad_norm"] > 0
    assert learned[0]["ppo/critic_grad_norm"] > 0
    assert learned[0]["ppo/skipped_steps"] == 0

    saved = {
        "actor": AutoModelForCausalLM.from_pretrained(run_dir / "ppo/actor"),
        "critic": AutoModelForSequenceClassification.from_pretrained(run_dir / "ppo/critic"),
    }
    before = AutoModelForCausalLM.from_pretrained(models / "policy")
    changed = sum(
        not torch.equal(weights.float(), before.get_parameter(name).float())
        for name, weights in saved["actor"].named_parameters()
    )
    assert changed > 0, "the step reached the saved weights"
    ids_BS = torch.arange(5, 15)[None]
    assert saved["actor"](ids_BS).logits.shape == (1, 10, VOCABULARY)
    assert saved["critic"](ids_BS).logits.shape == (1, 1)
    shutil.rmtree(run_dir)  # 0.7 GB
