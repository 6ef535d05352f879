"""The one list of metric names, and the page that explains them.

``python -m rlhf.tracking.metrics`` renews ``docs/metrics.md``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from rlhf.config.pages import write_below
from rlhf.tracking.metric_table import REWARD, SFT, TIMES, MetricInfo
from rlhf.tracking.option_metric_table import DPO, PPO_OPTIONS
from rlhf.tracking.ppo_metric_table import DIVERGENCE, LOSSES, ROLLOUT, SCORES

GROUPS: Mapping[str, Mapping[str, MetricInfo]] = {
    "Supervised fine-tuning": SFT,
    "Reward model": REWARD,
    "PPO: scores and rewards": SCORES,
    "PPO: how far the policy moves": DIVERGENCE,
    "PPO: losses, values and advantages": LOSSES,
    "PPO: responses and optimisers": ROLLOUT,
    "PPO: what its options bring": PPO_OPTIONS,
    "Time and speed of PPO": TIMES,
    "DPO": DPO,
}
METRICS = {name: info for group in GROUPS.values() for name, info in group.items()}

TABLE_MARK = "<!-- Made by `python -m rlhf.tracking.metrics` from here to the end. -->\n"


def check_name(name: str) -> None:
    """Refuse a metric that is not documented.

    Raises:
        KeyError: no table has ``name``; the message names the nearest that exists.
    """
    if name in METRICS:
        return
    nearest = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)[0]
    raise KeyError(
        f"unknown metric {name!r}; the nearest is {nearest!r}. "
        "A new metric needs its line in one of the metric tables beside metrics.py."
    )


def is_timing(name: str) -> bool:
    """True for what differs between two runs that are otherwise identical."""
    return name.startswith(("time/", "speed/", "memory/")) or name.endswith("_per_second")


def markdown_table() -> str:
    """All metrics as Markdown, one table per group."""
    head = "| name | unit | meaning | healthy | otherwise |\n| --- | --- | --- | --- | --- |\n"
    return "\n".join(
        f"## {title}\n\n{head}" + "".join(_markdown_row(n, info) for n, info in group.items())
        for title, group in GROUPS.items()
    )


def _markdown_row(name: str, info: MetricInfo) -> str:
    cells = (f"`{name}`", *(cell.replace("|", "\\|") for cell in info))
    return "| " + " | ".join(cells) + " |\n"


def renew_page(path: Path) -> None:
    """Write the tables into ``path``, below its mark; what stands above is kept."""
    write_below(path, TABLE_MARK, markdown_table())


if __name__ == "__main__":
    renew_page(Path("docs/metrics.md"))
