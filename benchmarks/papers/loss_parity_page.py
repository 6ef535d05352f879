"""Write benchmarks/losses.md from the figures of ``loss_parity``.

cd benchmarks && python -m papers.loss_parity_page
"""

from __future__ import annotations

import json
from pathlib import Path

from common import BENCHMARKS, table

from papers.claims import Figures
from papers.loss_parity import PEERS, largest_gaps
from papers.parity_sides import Pair
from papers.peer_wheels import VERSIONS, Wheels

FIGURES = BENCHMARKS / "results" / "papers" / "loss_parity.json"
PAGE = BENCHMARKS / "losses.md"
HEAD = """# Losses beside other projects

See whether a loss that you know from {peers} is the same here, and what to change if it is not.

```bash
make papers ONLY=loss_parity    # compares again; downloads four wheels, installs none
```

Each row runs a function of a published wheel and ours on the same {seeds} sets of random tensors,
with ragged responses and padding that holds numbers. *Gap* is the largest difference of an element
of value or gradient, as a share of the tensor's largest element. Where it is above 1e-6 the row
names the difference, and the last column is the gap without it. Of {all} rows {equal} are equal as
they are. A loss is a mean over the tokens of the batch if the row says nothing else. Gaps below
1e-6 are rounding: some peers compute in fp32, or add 1e-8 to a divisor.

`python -m papers.loss_parity_page`, in `benchmarks/`, makes this page from the figures.

"""
TAIL = """## Other by default

- TRL and AgileRL multiply k3 in the loss by the differentiable ratio of policy and sampler unless
  `use_bias_correction_kl=False`. Here `ppo.kl_estimator` is `k3_ratio` or `k3`.
- verl cuts the ratio of DPPO off at `clip_ratio_c`, which is 3 if it is not set; here it is 20.

## Not compared

- TRL's group advantages: they are computed within a method that also samples. TRL adds 1e-4 to the
  standard deviation; here it is 1e-6.
- Losses without a counterpart here, such as verl's `geo_mean`, `kl_cov` and `k3+`, TRL's `sapo`
  and `vespo`, and ratios of turns in AgileRL.
- How a batch is divided over micro-batches and processes: each function saw a whole batch.
"""


def measured(figures: Path) -> dict[int, Figures]:
    """Return the figures of each seed."""
    seeds = json.loads(figures.read_text())["seeds"]
    return {int(seed): each["figures"] for seed, each in seeds.items()}


def parity_page(figures: Path) -> str:
    """Return the page; the words come from the comparisons, which need no wheels for it."""
    seeds = {
        seed: each["figures"] for seed, each in json.loads(figures.read_text())["seeds"].items()
    }
    gaps = largest_gaps(seeds)
    sections = [_section(peer, PEERS[peer](Wheels()), gaps) for peer in PEERS]
    head = HEAD.format(
        peers=", ".join([*PEERS][:-1]) + f" or {[*PEERS][-1]}",
        seeds=len(seeds),
        all=len(gaps),
        equal=sum(len(each) == 1 for each in gaps.values()),
    )
    return head + "\n".join([*sections, TAIL])


def _section(peer: str, pairs: list[Pair], gaps: dict[str, list[float]]) -> str:
    rows = []
    for pair in pairs:
        found, rest = (*gaps[f"{peer}: {pair.quantity}"], None)[:2]
        file, _, what = pair.theirs.partition(": ")
        ours = ", ".join(f"`{each}`" for each in pair.ours.split(", "))
        difference = pair.difference or "-"
        rows.append([pair.quantity, f"`{file}`: {what}", ours, _gap(found), difference, _gap(rest)])
    header = ["quantity", f"in {peer}", "here", "gap", "difference", "gap without it"]
    text = table(header, rows).replace("---:", "---")  # words are read from the left
    return f"## {peer} {VERSIONS[peer]}\n\n{text}\n"


def _gap(gap: float | None) -> str:
    return "-" if gap is None else f"{gap:.0e}" if gap else "0"


if __name__ == "__main__":
    PAGE.write_text(parity_page(FIGURES))
