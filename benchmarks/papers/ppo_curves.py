"""Whether AgileRL's PPO and the one here learn alike from the same model, prompts and rewards.

AgileRL trains adapters of actor and critic on one frozen model, with its own fixed AdamW, a clip of
values as wide as the one of ratios, and k3 in the loss: our run takes these settings from it.
"""

from __future__ import annotations

from papers.beside_peer import Peer
from papers.claims import PaperResult
from papers.peer_wheels import VERSIONS

PEER = Peer(
    name="AgileRL",
    packages=f"torch==2.13.0 'agilerl[cpu-llm]=={VERSIONS['AgileRL']}'",
    variable="RLHF_AGILERL_PYTHON",
    script="peer_ppo.py",
    recipe=(
        "experiment=gold_ppo",
        "lora=default",
        "ppo.actor_lr=1e-3",
        "ppo.critic_lr=3e-3",
        "ppo.steps=48",
        "ppo.lr_schedule=constant",
        "ppo.warmup_steps=0",
        "ppo.weight_decay=0.01",
        "ppo.beta2=0.999",
        "ppo.cliprange_value=0.2",
        "ppo.kl_estimator=k3",
        "ppo.kl_placement=loss",
        "ppo.eval_every=0",
        "ppo.eval_prompts=16",
    ),
)

RESULT = PaperResult(
    title="Learning curves beside AgileRL's PPO",
    source="AgileRL 2.58.0, ppo_llm.PPO, whose losses benchmarks/losses.md compares on fixed "
    "tensors",
    claim="From the same model, prompts, rewards and settings, two implementations of PPO with "
    "adapters learn as fast.",
    criterion="experiment=gold_ppo with adapters of rank 16 on actor and critic at a constant "
    "rate, 48 steps of 128 prompts, two passes of two updates; AgileRL from the same SFT model on "
    "the same prompts, with one turn for each token, so that the last token alone is rewarded. "
    "Mean gold of the responses of the last 14 steps, ours minus AgileRL's, paired by seed. "
    "Passed: its interval lies within ±0.04. Failed: it lies outside.",
    seeds=(1, 2, 3, 4, 5),
    minutes=8,
    needs=PEER.needs,
    measure=PEER.measure,
    judge=PEER.judge,
)
