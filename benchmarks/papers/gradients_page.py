"""Write benchmarks/gradients.md from the figures: python -m papers.gradients_page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import BENCHMARKS, table

from papers.claims import Figures
from papers.gradients import (
    AT_SAMPLES,
    BLOCKS,
    COLUMNS,
    PEER_ADVANTAGES,
    PEER_KLS,
    PEER_LOSSES,
)
from papers.loss_parity import all_pairs
from papers.peer_wheels import Wheels
from papers.pooled import pooled

PAGE = BENCHMARKS / "gradients.md"
FIGURES = BENCHMARKS / "results" / "papers" / "gradients.json"
HEAD = """# Which gradient is right

Choose an estimator by the bias and the noise of its gradient. For a configuration or a loss of your
own, `python -m rlhf_lab.gradients` prints the same ([algorithms](../docs/algorithms.md)).

```bash
make papers ONLY=gradients    # measures again; downloads four wheels, installs none
```

All responses of small random tasks are listed, so that the gradient of the objective, E[score] -
kl_ctl * KL(policy || reference), and the expected gradient of a loss are exact. Each row changes
keys of the default run's PPO. *Bias* is the share of the exact gradient's norm that no learning
rate recovers: 0 is right, 1 is useless. *KL alone* is the bias of the penalty's part. *Noise* is
the standard deviation of the gradient of {samples} responses, as a share of the expected gradient's
norm. *Last update*: the bias after updates that moved the policy by 0.01 nats per token. Figures
are means over {seeds} tasks; advantages are whitened where the default run's are. An older policy
is as many times 0.01 nats per token away as the lag has steps.

`python -m papers.gradients_page`, in `benchmarks/`, makes this page from the figures.

"""
PEERS = """## Functions of other projects

The same answers, all of three tokens, or of two for advantages, seen by functions of the wheels;
the advantages of the losses are exact. The second column is our function's bias. Use what has the
bias of its purpose: most projects have our gradients, and their defaults of GRPO divide by the
deviation.

"""
NAMES = {"bias": "bias", "kl_bias": "KL alone", "noise": "noise", "last_bias": "last update"}


def gradients_page(figures: Mapping[int, Figures]) -> str:
    """Return the page."""
    text = HEAD.format(seeds=len(figures), samples=AT_SAMPLES)
    places = [COLUMNS.index(each) for each in NAMES]
    for title, (advice, rows) in BLOCKS.items():
        cells = [
            [row.words, *_mean_cells(pooled(figures, row.words)[:, places].mean(dim=0).tolist())]
            for row in rows
            if row.words in figures[min(figures)]  # or it is newer than the figures
        ]
        text += f"## {title}\n\n{advice}\n\n{table(['', *NAMES.values()], cells)}\n\n"
    pairs = all_pairs(Wheels())
    cells = []
    for name in (*PEER_LOSSES, *PEER_KLS, *PEER_ADVANTAGES):
        theirs, ours, _ = pooled(figures, name).mean(dim=0).tolist()
        where = pairs[name].theirs.partition(": ")[2]
        cells.append([name, f"`{where}`", *_mean_cells([theirs, ours])])
    return text + PEERS + table(["", "function", "bias", "here"], cells) + "\n"


def _mean_cells(values: Sequence[float]) -> list[str]:
    return ["0" if value < 1e-6 else f"{value:.3f}" for value in values]  # noqa: PLR2004


def read_figures(file: Path) -> dict[int, Figures]:
    """Return the figures of each seed."""
    seeds = json.loads(file.read_text())["seeds"]
    return {int(seed): each["figures"] for seed, each in seeds.items()}


if __name__ == "__main__":
    PAGE.write_text(gradients_page(read_figures(FIGURES)))
