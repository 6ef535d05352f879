"""The doors of the program, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from random import Random

from tests.fuzz import (
    command_words,
    data_files,
    endpoints,
    ensembles,
    interpolations,
    journals,
    phase_stores,
    reward_functions,
    run_dirs,
    run_folders,
    token_caches,
)
from tests.fuzz.case import Case, Cases
from tests.fuzz.folders import model_cases, tokenizer_cases

DOORS: Mapping[str, Cases] = {
    "models": model_cases,
    "tokenizers": tokenizer_cases,
    "data": data_files.cases,
    "reward functions": reward_functions.cases,
    "endpoints": endpoints.cases,
    "run directories": run_dirs.cases,
    "store": phase_stores.cases,
    "ensembles": ensembles.cases,
    "journals": journals.cases,
    "command words": command_words.cases,
    "interpolations": interpolations.cases,
    "run folders": run_folders.cases,
    "token caches": token_caches.cases,
}


def mixed(seed: int, folder: Path, doors: Mapping[str, Cases] = DOORS) -> Iterator[Case]:
    """Yield inputs of all doors in turn; each input may write in a folder of its own."""
    for number in count():
        for name, cases in doors.items():
            here = folder / name / str(number)
            here.mkdir(parents=True)
            found = next(cases(Random(f"{seed} {name} {number}"), here))
            yield found._replace(name=f"{name} {number}: {found.name}")
