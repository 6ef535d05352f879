"""Memory and speed of PPO with separate models, with adapters, and with a shared trunk.

    python benchmarks/shared_trunk.py [--shape tiny] [--rounds 3]

16 prompts of 64 tokens, 64 response tokens, one optimiser step. The ways take turns; each turn is a
new process, whose first two iterations are not counted. Medians are printed. The models have random
weights: what is measured is work, not learning.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

from common import BENCHMARKS, Way, finish, medians, parser, table, take_turns
from shapes import SHAPES, Work, make_models

TRUNK = "shared trunk, a third of the layers trained"
WAYS = {
    "separate models": [],
    "LoRA, rank 16": ["lora=default"],
    TRUNK: ["ppo.shared_trunk=true"],
}
PARTS = ("generate", "score", "train", "iteration")


def main() -> None:
    """Measure every way in turn, and print the table."""
    options = parser(__doc__, shape="tiny")
    options.add_argument("--rollout", choices=("fast", "hf"), default="fast")
    options = options.parse_args()
    shape, work = SHAPES[options.shape], Work()
    fixed = [f"rollout={options.rollout}", f"hardware.device={options.device}"]
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder), shape)
        shared = {"folder": folder, "repeats": options.repeats, "vocab": shape.policy.vocab}
        ways = {}
        for name, chosen in WAYS.items():
            overrides = [*fixed, *chosen]
            if name == TRUNK:
                overrides.append(f"ppo.num_layers_unfrozen={max(1, shape.policy.layers // 3)}")
            task = shared | {"work": asdict(work), "overrides": overrides}
            ways[name] = Way(script=BENCHMARKS / "ppo_parts.py", task=task)
        found = take_turns(ways, options.rounds)
    rows = [
        {"way": name, **{part: medians(samples)[part] for part in PARTS}}
        | {"peak_gb": max(samples["peak_gb"]), "samples": samples}
        for name, samples in found.items()
    ]
    header = ("way", "generate, s", "score, s", "train, s", "iteration, s", "peak GB")
    text = table(header, [[row[key] for key in ("way", *PARTS, "peak_gb")] for row in rows])
    finish(options, text, {"rows": rows})


if __name__ == "__main__":
    main()
