"""DeepSpeed-Chat's own test matrix for step 3, on two ranks.

ZeRO {2, 3} x offload {off, on} x LoRA {off, on}; each must train a step and save models that load.
Only ``make soak`` runs it: stages 2 and 3 of two ranks stand in test_ranks_and_stages.py, adapters
that two ranks save in sharded_rank.py, and both with offload, on a pretended GPU, in
test_gpu_runs.py.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.runs import launch, metrics

pytestmark = [pytest.mark.slow, pytest.mark.soak]

SHORT = [
    "phase=ppo",
    "data.size=300",
    "hardware.ranks_per_node=2",
    "model=pretrained",
    "model@reward_model=pretrained",
    "ppo.steps=1",
    "ppo.rollout_batch_size=4",
    "ppo.mini_batch_size=4",
    "ppo.ppo_epochs=1",
    "ppo.warmup_steps=0",
    "ppo.eval_prompts=2",
    "ppo.ptx_eval_blocks=0",
    "rollout.max_response_tokens=4",
]


@pytest.mark.parametrize("lora", ["none", "default"])
@pytest.mark.parametrize("zero", ["stage2", "stage2_offload", "stage3", "stage3_offload"])
def test_ppo_trains_and_saves(zero: str, lora: str, tiny_run: Path, tmp_path: Path) -> None:
    """A step of PPO changes the saved weights, and what is saved loads."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    run_dir, policy = tmp_path / "run", tiny_run / "sft" / "model"
    paths = [f"model.path={policy}", f"reward_model.path={tiny_run / 'reward' / 'model'}"]
    run = launch(*SHORT, *paths, f"zero={zero}", f"lora={lora}", f"run_dir={run_dir}", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    result = json.loads((run_dir / "result.json").read_text())["phases"]["ppo"]
    assert result["steps"] == 1
    (learned,) = [line for line in metrics(run_dir) if "ppo/actor_grad_norm" in line]
    assert learned["ppo/actor_grad_norm"] > 0
    assert learned["ppo/critic_grad_norm"] > 0
    assert learned["ppo/skipped_steps"] == 0

    before, actor = map(AutoModelForCausalLM.from_pretrained, (policy, run_dir / "ppo/actor"))
    assert any(
        not torch.equal(weights.float(), before.get_parameter(name).float())
        for name, weights in actor.named_parameters()
    ), "the step reached the saved weights"
    ids_BS = torch.arange(5, 15)[None]
    assert actor(ids_BS).logits.shape == (1, 10, len(before.get_input_embeddings().weight))
    critic = AutoModelForSequenceClassification.from_pretrained(run_dir / "ppo/critic")
    assert critic(ids_BS).logits.shape == (1, 1)
