"""Read what a search (docs/sweeps.md) optimises, and its solutions, for the page of its trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from rlhf.base.stored_files import DamagedFileError, read_stored_text
from rlhf.report.comparison import Setting

STUDY_RESULTS = "optimization_results.yaml"


class StudyResults(NamedTuple):
    """The objectives of a study, and its solutions: the trials that no other trial beats."""

    maximize: Sequence[str]
    minimize: Sequence[str]
    solutions: Mapping[int, Mapping[str, float]]  # value of each objective, by number of the trial

    @property
    def headline(self) -> str:
        """Return the solutions as a sentence; equal ones are named together."""
        goals = [f"{name} (higher)" for name in self.maximize]
        goals += [f"{name} (lower)" for name in self.minimize]
        named = " and ".join(goals)
        if not self.solutions:
            return f"No trial has a valid result yet for {named}"
        trials = ", ".join(map(str, self.solutions))
        if len(goals) > 1:
            return f"Pareto front of {named}: trial{'s' * (len(self.solutions) > 1)} {trials}"
        (value,) = next(iter(self.solutions.values())).values()
        tied = " (tied)" if len(self.solutions) > 1 else ""
        return f"Best {named} is {value:.4g}: trial{'s' if tied else ''} {trials}{tied}"

    def has_solution(self, setting: Setting) -> bool:
        """Return True if a trial with the values of ``setting`` is a solution."""
        return not self.solutions.keys().isdisjoint(trial_numbers(setting))


def read_study(folder: Path) -> StudyResults | None:
    """Read the objectives and solutions of the search in ``folder``; None if it is no search.

    Raises:
        DamagedFileError: if the file has another form than searches write.
    """
    path = folder / STUDY_RESULTS
    if (text := read_stored_text(path)) is None:
        return None
    try:
        content = yaml.safe_load(text)
        solutions = {
            int(each["trial"]): {
                str(name): float(value) for name, value in each["best_evaluated_value"].items()
            }
            for each in content["solutions"]
        }
        maximize, minimize = (
            [str(name) for name in content[key]] for key in ("maximize", "minimize")
        )
    except (yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFileError(path, f"it is not what a search writes ({error!r})") from error
    return StudyResults(maximize, minimize, solutions)


def trial_numbers(setting: Setting) -> list[int]:
    """Return the numbers of the trials with the values of ``setting``; [] outside of a search."""
    names = (run.folder.name.partition(",")[0] for run in setting.runs)
    return [int(name) for name in names if name.isdecimal()]
