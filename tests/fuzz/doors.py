"""The doors of the program, by name."""

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from random import Random

from tests.fuzz import command_words, data_files, model_fields, run_folders, stores
from tests.fuzz.case import Case, Cases
from tests.fuzz.folders import model_cases, tokenizer_cases

DOORS: Mapping[str, Cases] = {
    "models": model_cases,
    "tokenizers": tokenizer_cases,
    "data": data_files.cases,
    "store": stores.phase_cases,
    "journals": stores.journal_cases,
    "token caches": stores.token_cases,
    "ensembles": stores.ensemble_cases,
    "command words": command_words.cases,
    "run folders": run_folders.cases,
    "model fields": model_fields.cases,
}


def mixed(seed: int, folder: Path, doors: Mapping[str, Cases] = DOORS) -> Iterator[Case]:
    """Yield inputs of all doors in turn; each input may write in a folder of its own."""
    for number in count():
        for name, cases in doors.items():
            here = folder / name / str(number)
            here.mkdir(parents=True)
            found = next(cases(Random(f"{seed} {name} {number}"), here))
            yield found._replace(name=f"{name} {number}: {found.name}")
