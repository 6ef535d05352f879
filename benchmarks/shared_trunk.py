"""Memory and speed of PPO with separate models, with adapters, and with a shared trunk.

    python benchmarks/shared_trunk.py [ROUNDS]

Every way runs in a process of its own, one after another, ROUNDS (3) times; medians are printed.
The models have random weights of the shape below: what is measured is work, not learning.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WAYS = {
    "separate models": [],
    "LoRA, rank 16": ["lora=default"],
    "shared trunk, 2 of 6 layers trained": ["ppo.shared_trunk=true", "ppo.num_layers_unfrozen=2"],
}
SHAPE = {
    "model_type": "opt",
    "hidden_size": 256,
    "ffn_dim": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 256,
    "max_position_embeddings": 256,
    "vocab_size": 8192,
}
PROMPT_TOKENS, RESPONSE_TOKENS, SEQUENCES, STEPS = 64, 64, 16, 5


def make_models(folder: Path) -> None:
    """A policy and a reward model of the shape."""
    from rlhf.models.building import ModelSource, build_actor, build_scorer
    from rlhf.models.tokenizers import train_tokenizer

    tokenizer = train_tokenizer(["a benchmark"], vocab_size=300)
    source = ModelSource(key="model", path=None, architecture=SHAPE)
    build_actor(source, tokenizer, seed=1).save_pretrained(folder / "policy")
    build_scorer(source, tokenizer, seed=2).pretrained.save_pretrained(folder / "reward")
    for name in ("policy", "reward"):
        tokenizer.save_pretrained(folder / name)


def measure(folder: Path, overrides: list[str]) -> dict[str, float]:
    """Median seconds of the parts of a PPO step, and the peak memory of this process."""
    import torch
    from hydra import compose, initialize_config_dir

    from rlhf import PPOTrainer, RLHFEngine
    from rlhf.algorithms.streams import stream
    from rlhf.config.freeze import to_run_config
    from rlhf.data.collate import collate_prompts

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose(
            "config",
            [
                "phase=ppo",
                "model=pretrained",
                "model@reward_model=pretrained",
                f"model.path={folder / 'policy'}",
                f"reward_model.path={folder / 'reward'}",
                f"ppo.rollout_batch_size={SEQUENCES}",
                f"ppo.mini_batch_size={SEQUENCES}",
                "ppo.ppo_epochs=1",
                f"rollout.max_prompt_tokens={PROMPT_TOKENS}",
                f"rollout.max_response_tokens={RESPONSE_TOKENS}",
                *overrides,
            ],
        )
    config = to_run_config(cfg)
    engine = RLHFEngine(config)
    trainer = PPOTrainer(engine, config.ppo)
    timings: list[dict[str, float]] = []
    for step in range(STEPS + 1):
        ids = torch.randint(5, 300, (SEQUENCES, PROMPT_TOKENS), generator=stream(1, "ids", step))
        draws_BT = torch.rand(SEQUENCES, RESPONSE_TOKENS, generator=stream(1, "draws", step))
        prompts = collate_prompts(
            ids.tolist(), [""] * SEQUENCES, draws_BT, pad_id=0, device=torch.device("cpu")
        )
        timings.append(trainer.train_rlhf(trainer.generate_experience(prompts)).metrics)
    parts = ("generate", "score", "train", "step")
    medians = {
        part: statistics.median(t[f"time/{part}_seconds"] for t in timings[1:]) for part in parts
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return medians | {"peak_gib": peak}


def main(rounds: int) -> None:
    """Measure every way in turn, and print the table."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        for _ in range(rounds):
            for way in WAYS:
                child = [sys.executable, __file__, "--measure", folder, way]
                output = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, check=True)
                found[way].append(json.loads(output.stdout.splitlines()[-1]))
    print("| | generate, s | score, s | train, s | step, s | peak, GiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for way, results in found.items():
        cells = (
            f"{statistics.median(result[name] for result in results):.2f}"
            for name in ("generate", "score", "train", "step", "peak_gib")
        )
        print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(Path(sys.argv[2]), WAYS[sys.argv[3]])))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
