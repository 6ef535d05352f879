"""Whether TRL's GRPO and the one here learn alike from the same model, prompts and rewards."""

from __future__ import annotations

from papers.beside_peer import Peer
from papers.claims import PaperResult
from papers.peer_wheels import VERSIONS

PEER = Peer(
    name="TRL",
    packages=f"torch==2.13.0 trl=={VERSIONS['TRL']} transformers==5.23.0 accelerate==1.15.0 "
    "datasets",
    variable="RLHF_TRL_PYTHON",
    script="peer_grpo.py",
    recipe=(
        "experiment=gold_grpo",
        "ppo.steps=28",
        "ppo.lr_schedule=constant",
        "ppo.warmup_steps=0",
        "ppo.eval_every=0",
        "ppo.eval_prompts=16",
    ),
)

RESULT = PaperResult(
    title="Learning curves beside TRL's GRPO",
    source="TRL 1.16.0, GRPOTrainer, whose losses benchmarks/losses.md compares on fixed tensors",
    claim="From the same model, prompts, rewards and settings, two implementations of GRPO learn "
    "as fast.",
    criterion="experiment=gold_grpo at a constant rate, 28 steps of 32 prompts with 4 responses, "
    "two passes of two updates; TRL from the same SFT model on the same prompts. Mean gold of the "
    "responses of the last 14 steps, ours minus TRL's, paired by seed. Passed: its interval lies "
    "within ±0.04. Failed: it lies outside.",
    seeds=(1, 2, 3, 4, 5),
    minutes=3,
    needs=PEER.needs,
    measure=PEER.measure,
    judge=PEER.judge,
)
