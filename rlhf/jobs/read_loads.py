"""Read and divide a run's data before it starts, as its ranks will, and count it for the plan.

What a phase would refuse is refused here, before a run directory is made. Data that is not on this
machine, or too large to be read quickly, is read only by the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NamedTuple

from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase, PlanMode, Source
from rlhf.config.schema.data import DataConfig
from rlhf.config.schema.run import RunConfig
from rlhf.data.phase_needs import require_corpus, require_examples
from rlhf.data.tables import SAMPLE
from rlhf.jobs.counted_data import SAMPLED, CountedData
from rlhf.planning.steps import Loads

LARGEST = 2**26  # bytes; larger data files, all together, are not read
ASSUMED = "The plan takes every example to be as long as allowed."


class Reading(NamedTuple):
    """The loads of a run's phases, and lines for the terminal about its data."""

    loads: Loads | None
    """None: the data was not read."""
    lines: list[str]


def read_loads(config: RunConfig, *, finished: Container[Phase] = ()) -> Reading:
    """Return the steps and lengths of every phase; check the phases that are not ``finished``.

    Raises:
        DataError: if the data is missing, malformed or too small for a phase.
        ConfigError: if PPO's options do not suit the steps that its examples allow.
    """
    is_plan = config.plan is PlanMode.only
    reason = _why_not_read(config.data, config.environment.processes, is_plan=is_plan)
    if reason is not None:
        return Reading(None, [f"data: not read: {reason} {ASSUMED}"])
    phases = [phase for phase in config.phase.order if phase not in finished]
    counted = CountedData(config, most=SAMPLED)
    if counted.is_sample and not all(counted.has_plenty(phase) for phase in phases):
        counted = CountedData(config, most=sys.maxsize)
    require_examples(config, {phase: counted.examples[phase] for phase in phases})
    corpus = config.data.ptx_path
    if Phase.ppo in phases and corpus is not None and _is_here_and_small(corpus):
        require_corpus(config.ppo, config.data, seed=config.seed)
    return Reading(counted.loads, counted.lines)


def _why_not_read(data: DataConfig, processes: int, *, is_plan: bool) -> str | None:
    """Return a sentence on why the launcher does not read the data; None if it does.

    ``processes`` are those of the run's environment.
    """
    if data.source is Source.environment and processes:
        return "only the ranks run an environment with processes of its own."
    if data.source in (Source.synthetic, Source.environment):
        return None
    if data.size and is_plan:
        return f"data.size={data.size} gives the number of examples."
    paths = _data_paths(data)
    if data.source is Source.hub:
        absent = [path for path, place in paths.items() if not place.exists()]
        if absent:
            return f"{', '.join(absent)} is not on this machine; the run downloads and checks it."
    if _bytes_at(paths.values()) > LARGEST:
        return f"{', '.join(paths)} has over {LARGEST >> 20} MiB; the run reads and checks it."
    return None


def _data_paths(data: DataConfig) -> dict[str, Path]:
    """Return the files, folders and hub ids of the data, as typed, with their places."""
    named = [(f"data.sets.{name}.path", each.path) for name, each in data.sets.items()]
    for key, value in (("data.path", data.path), ("data.eval_path", data.eval_path)):
        values = value if isinstance(value, list) else [] if value is None else [value]
        named += [(key, path) for path in values]
    return {
        path: expand_user_path(path, key=key) for key, path in named if not path.startswith(SAMPLE)
    }


def _is_here_and_small(corpus: str) -> bool:
    place = expand_user_path(corpus, key="data.ptx_path")
    return place.exists() and _bytes_at([place]) <= LARGEST


def _bytes_at(places: Iterable[Path]) -> int:
    """Return the bytes of the files at ``places``, and of the files in folders there."""
    # Two levels: save_to_disk writes a folder per split.
    found = [each for place in places for each in (place, *place.glob("*"), *place.glob("*/*"))]
    return sum(each.stat().st_size for each in found if each.is_file())
