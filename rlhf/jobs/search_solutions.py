"""Write the solutions of a search: the trials that no other trial beats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml

from rlhf.base.atomic import replace_atomically
from rlhf.jobs.search_command import Search

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


def write_solutions(search: Search, best: Sequence[FrozenTrial]) -> None:
    """Write optimization_results.yaml, under the name that Hydra's Optuna sweeper uses.

    ``best`` are the trials on the Pareto front, or all that share the best value.
    """
    content = {
        "name": "optuna",
        "maximize": search.study.maximize,
        "minimize": search.study.minimize,
        "solutions": [_solution(search, trial) for trial in best],
    }
    with replace_atomically(search.folder / "optimization_results.yaml") as building:
        building.write_text(yaml.safe_dump(content))


def _solution(search: Search, trial: FrozenTrial) -> dict[str, Any]:
    """Return a trial's values; choices are texts in Optuna, and become what the texts stand for."""
    return {
        "trial": trial.number,
        "best_evaluated_params": {
            key: yaml.safe_load(value) if isinstance(value, str) else value
            for key, value in trial.params.items()
        },
        "best_evaluated_value": dict(zip(search.objectives, trial.values or (), strict=True)),
    }
