"""Keys of a part of ``rewards`` with kind=judge."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import ABOVE_0, AT_LEAST_0, PROCESS_KEYS, Names, key

SHARED = ("url*", "token_variable", "batch_size", "retries", "columns")  # read by http too
OWN = ("rubric*", "model*", "votes", "temperature")
READ_BY_JUDGES = (*PROCESS_KEYS, *OWN, *SHARED)
VERDICTS = "verdicts.jsonl"  # file in the run directory with the answers of all judges


@dataclass(kw_only=True)
class JudgeKeys:
    """Keys of a part of ``rewards`` that a language model scores."""

    rubric: str | None = key(default=None, names=Names.place)
    """kind=judge: YAML file with the criteria (examples/rubric.yaml)."""
    model: str | None = None
    """kind=judge: name of the model that the server runs."""
    votes: int = key(ABOVE_0, default=1)
    """kind=judge: verdicts on a response; its score is their mean."""
    temperature: float = key(AT_LEAST_0, default=0.0)
    """kind=judge: sampling temperature of the verdicts."""
