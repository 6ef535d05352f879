"""Run launch.py and write which keys each phase reads: ``python -m tests.config_reads FILE WORDS``.

The sizes of all phases, and the keys that switch options on, are read together, and a copy reads
all keys, so what ``TOGETHER`` reads does not count. A key of a class that two groups share is
written as both keys, with a space between them.
"""

import json
import runpy
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any, get_type_hints

from rlhf.config.schema.run import RunConfig
from rlhf.methods import installed_methods
from tests.runs import ROOT

TOGETHER = ("batch_plans", "find_token_limit", "values_by_key", "replace")
TOGETHER += ("Method.is_on", "MethodKeys.of")

Reads = dict[str, set[str]]


def groups(schema: type, prefix: str = "") -> Iterator[tuple[type, str]]:
    """Yield the classes of the schema, each with the prefix of its keys."""
    yield schema, prefix
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind):
            yield from groups(kind, f"{prefix}{name}.")


def phase_of(frame: FrameType | None) -> str | None:
    """Return the phase whose runner called; None outside, and where sizes are computed."""
    while frame is not None and frame.f_code.co_qualname not in TOGETHER:
        if frame.f_code.co_name == "run_phase":
            return str(frame.f_locals["phase"])
        frame = frame.f_back
    return None


def record(schema: type, prefixes: list[str], reads: Reads) -> None:
    """Add to ``reads`` which keys of ``schema`` are read in which phase."""
    names = {field.name for field in fields(schema)}

    def read(self: Any, name: str) -> Any:
        if name in names and (phase := phase_of(sys._getframe(1))) is not None:
            keys = " ".join(f"{prefix}{name}" for prefix in prefixes)
            reads.setdefault(phase, set()).add(keys)
        return object.__getattribute__(self, name)

    schema.__getattribute__ = read  # type: ignore[method-assign,assignment]


def main(file: str, words: list[str]) -> None:
    """Run launch.py in this process, on one rank, and write the keys to ``file`` as JSON."""
    reads: Reads = {}
    found = list(groups(RunConfig))
    for schema in {schema for schema, _ in found}:
        record(schema, [prefix for each, prefix in found if each is schema], reads)
    for method in installed_methods():  # which read their keys from a copy of them
        for group, keys in method.keys.items():
            record(keys, [f"{group}."], reads)
    sys.argv = ["launch.py", *words]
    try:
        runpy.run_path(str(ROOT / "launch.py"), run_name="__main__")
    finally:
        Path(file).write_text(json.dumps({phase: sorted(keys) for phase, keys in reads.items()}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
