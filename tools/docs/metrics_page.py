"""Generate the tables of docs/metrics.md: ``python -m tools.docs.metrics_page``."""

from __future__ import annotations

from pathlib import Path

from rlhf.run.metric_table import GROUPS, MetricInfo
from tools.docs.pages import write_below

TABLE_MARK = "<!-- Made by `python -m tools.docs.metrics_page` from here to the end. -->\n"


def markdown_table() -> str:
    """Return all metrics as Markdown, one table per group."""
    head = "| name | unit | better | meaning | healthy | otherwise |\n|" + " --- |" * 6 + "\n"
    return "\n".join(
        f"## {title}\n\n{head}" + "".join(_markdown_row(n, info) for n, info in group.items())
        for title, group in GROUPS.items()
    )


def _markdown_row(name: str, info: MetricInfo) -> str:
    unit, *texts = (cell.replace("|", "\\|") for cell in info[:4])
    cells = (f"`{name}`", unit, info.better or "", *texts)
    return "| " + " | ".join(cells) + " |\n"


def renew_page(path: Path) -> None:
    """Replace the tables below the mark in ``path``; keep the text above it."""
    write_below(path, TABLE_MARK, markdown_table())


if __name__ == "__main__":
    renew_page(Path("docs/metrics.md"))
