"""Build the tiles at the top of a run's page: its most important measures, before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rlhf.report.summary import summary_blocks

# Rows of the summary that become tiles: of each line, the first row that the last phase has.
TILES = (
    (
        *("exactly right", "held-out gold score", "held-out score"),
        *("held-out ranking", "held-out accuracy", "held-out perplexity"),
    ),
    ("KL to reference, nats",),
    ("response tokens",),
)
INTERVALS = ("  gain, 95 % interval", "  95 % interval")


class Tile(NamedTuple):
    """A measure before and after the last phase, with a note; "" stands for a missing value."""

    label: str
    before: str
    after: str
    note: str = ""


def build_tiles(result: Mapping[str, Any]) -> list[Tile]:
    """Return up to four tiles: what the last phase reached, its KL and length, and the time."""
    blocks = {block.name: block for block in summary_blocks(result)}
    run = blocks.pop("run", None)
    tiles = []
    rows = [*blocks.values()][-1].rows if blocks else []
    places = {row.measure: at for at, row in reversed([*enumerate(rows)])}
    for names in TILES:
        if (at := next((places[name] for name in names if name in places), None)) is not None:
            after = rows[at + 1 : at + 2]
            notes = [f"{e.measure.strip()} {e.after}" for e in after if e.measure in INTERVALS]
            tiles.append(Tile(*rows[at], *notes))
    if run is not None:
        planned = [f"planned {row.after}" for row in run.rows[1:2] if row.measure == "  planned"]
        tiles.append(Tile("time", "", run.duration, *planned))
    return tiles
