"""Read the files of a run directory, which may be damaged or come from somebody else.

A *form* is what a JSON value must look like: a class (``float`` takes any number), a tuple
of forms of which one must fit, ``[form]`` for a list, ``{key: form}`` for an object, or a function
that returns the form for the name of a key. An object's key that ends in ``?`` may be missing, and
``OTHERS`` is the form of the keys that the form does not list.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf.base.errors import CheckpointError

Form = Any
OTHERS = "*"
LARGEST = 1e60  # of a number; a chart squares it

NAMES = {str: "a text", float: "a number", int: "a whole number", bool: "true or false"}
NAMES |= {type(None): "null"}
MAYBE_FLOAT = (float, type(None))  # null is a number that was not finite
COST = {"hours": MAYBE_FLOAT, "memory_gib": MAYBE_FLOAT}
MEASURED = {"hours": float, "memory_gib?": float}  # of phases that the run has trained


def _measure(name: str) -> Form:
    """Return the form of a value in a phase's result."""
    if name.endswith("_ci"):
        return [MAYBE_FLOAT, MAYBE_FLOAT]
    if "_parts_" in name or name == "minimal_pairs":
        return {OTHERS: MAYBE_FLOAT}
    return MAYBE_FLOAT


def _phase(*required: str) -> Form:
    form: dict[str, Form] = {name: _measure(name) for name in required}
    paths = {"reused_from?": str, "seconds": float, "measured": MEASURED, "planned?": COST}
    return form | paths | {OTHERS: _measure}


PHASES = {
    "sft": _phase("perplexity_before", "perplexity_after"),
    "reward": _phase("accuracy", "accuracy_ci"),
    "dpo": _phase("accuracy", "accuracy_ci", "kl_to_reference"),
    "ppo": _phase("score_before", "score_after", "kl_to_reference"),
}
RESULT = {
    "objective": MAYBE_FLOAT,
    "phases": {f"{name}?": form for name, form in PHASES.items()},
    "versions": {OTHERS: str},
    "measured": MEASURED,
    "planned?": COST,
}
LINE: Form = {"phase": str, "step": int}
METRICS: Form = {**LINE, OTHERS: MAYBE_FLOAT}
ALARM: Form = {**LINE, "name": str, "metric": str, "value": MAYBE_FLOAT, "advice": str}
SAMPLE: Form = {
    **LINE,
    **{"prompt": str, "response": str, "ended?": bool, "model?": str, "token_texts?": [str]},
    **{f"{name}?": MAYBE_FLOAT for name in ("score", "kl", "gold")},
    **{f"token_{name}?": [MAYBE_FLOAT] for name in ("kl", "values", "advantages")},
    "gold_parts?": {OTHERS: MAYBE_FLOAT},
}
ANSWER: Form = {
    **{name: str for name in ("model", "decoder", "prompt", "response")},
    **{"sample": int, "score": MAYBE_FLOAT, "kl": MAYBE_FLOAT, "tokens": float},
    **{"ended": (bool, float), "right": (bool, type(None))},
}
PAIR: Form = {"margin": float}
HELD_OUT: Form = {OTHERS: {OTHERS: [MAYBE_FLOAT]}}
FIGURES: Form = {OTHERS: MAYBE_FLOAT, "pass_at?": {OTHERS: MAYBE_FLOAT}}
FIGURES |= {f"{name}_ci?": [MAYBE_FLOAT, MAYBE_FLOAT] for name in ("score", "right")}
EVALUATED: Form = {
    "models": {OTHERS: {"decoders": {OTHERS: FIGURES}, "perplexity?": MAYBE_FLOAT}},
    "win_rates": [
        {
            **{"model": str, "against": str, "rate": float},
            **{"ci": [float, float], "controlled": float},
        }
    ],
    "reward_model?": {
        "accuracy": float,
        "pairs": int,
        "calibration": [{"certainty": float, "right": float}],
    },
}


class DamagedFileError(CheckpointError):
    """A file of a run directory that does not hold what a run writes there."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} is damaged, or no run wrote it: {reason}. Restore the file from a copy, or "
            "remove it if you can do without it"
        )


def read_bytes(path: Path) -> bytes | None:
    """Return the content of a file; None if there is none.

    Raises:
        DamagedFileError: if it is a link, which could show any file in a report, or no file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DamagedFileError(path, "it is not a regular file")
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        is_link = error.errno == errno.ELOOP
        raise DamagedFileError(path, "it is a link" if is_link else str(error.strerror)) from error


def read_stored_text(path: Path) -> str | None:
    """Return the text of a file; None if there is none.

    Raises:
        DamagedFileError: if it is no file, or its text is not UTF-8.
    """
    if (content := read_bytes(path)) is None:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFileError(path, f"it is not UTF-8 ({error.reason})") from error


def read_json(path: Path, form: Form) -> Any:
    """Return the value in a file, which has the form; None if there is no file.

    Raises:
        DamagedFileError: naming the place in the file that has another form.
    """
    content = read_bytes(path)
    return None if content is None else _parse_json(path, content, form, "")


def read_lines(path: Path, form: Form) -> Iterator[Any]:
    """Yield the value of each line of a file, up to a torn last line; a missing file has none.

    Raises:
        DamagedFileError: naming the line, and the place in it, that has another form.
    """
    return (value for _, value in raw_lines(path, form))


def raw_lines(path: Path, form: Form) -> Iterator[tuple[bytes, Any]]:
    """Yield what ``read_lines`` yields, after the bytes of the line without its end."""
    # Lines end only at "\n": str.splitlines also splits at U+2028, which JSON strings may contain.
    *whole, torn = (read_bytes(path) or b"").split(b"\n")
    for number, line in enumerate(whole, start=1):
        if line:
            yield line, _parse_json(path, line, form, f"line {number}: ")
    value = None
    with suppress(DamagedFileError):  # no line end: the process was killed while it wrote the line
        value = _parse_json(path, torn, form, "")
    if value is not None:
        yield torn, value


def _parse_json(path: Path, content: bytes, form: Form, place: str) -> Any:
    try:
        text = content.decode("utf-8")
        value = json.loads(text, parse_constant=lambda _: None)  # NaN and Infinity are no JSON
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise DamagedFileError(path, f"{place}not JSON in UTF-8 ({reason})") from error
    if (fault := _fault(value, form, "")) is not None:
        raise DamagedFileError(path, place + fault)
    return value


def _fault(value: Any, form: Form, name: str) -> str | None:
    """Return where ``value``, which ``name`` leads to, lacks the form; None if it has the form."""
    if callable(form) and not isinstance(form, type):
        form = form(name.rpartition(".")[2])
    if isinstance(form, tuple):
        faults = [_fault(value, each, name) for each in form]
        return None if None in faults else faults[0]
    if isinstance(form, dict):
        return (
            _fault_of_object(value, form, name)
            if isinstance(value, dict)
            else _not(name, "an object")
        )
    if isinstance(form, list):
        if not isinstance(value, list):
            return _not(name, "a list")
        if len(form) > 1 and len(form) != len(value):
            return _not(name, f"a list of {len(form)}")
        forms = form if len(form) > 1 else form * len(value)
        items = (
            _fault(v, f, f"{name}[{i}]") for i, (v, f) in enumerate(zip(value, forms, strict=True))
        )
        return next((fault for fault in items if fault), None)
    return None if _is_a(value, form) else _not(name, NAMES[form])


def _fault_of_object(value: dict[str, Any], form: dict[str, Form], name: str) -> str | None:
    prefix = f"{name}." if name else ""
    for key in form:
        if not key.endswith("?") and key != OTHERS and key not in value:
            return f"{prefix}{key} is missing"
    for key, each in value.items():
        of_key = form.get(key, form.get(f"{key}?", form.get(OTHERS)))
        if of_key is not None and (fault := _fault(each, of_key, f"{prefix}{key}")):
            return fault
        if key.endswith("_before") and f"{key[:-6]}after" not in value:
            return f"{prefix}{key[:-6]}after is missing"
    return None


def _is_a(value: Any, kind: type) -> bool:
    if kind in {int, float}:
        is_number = isinstance(value, int | (float if kind is float else int))
        return is_number and not isinstance(value, bool) and abs(value) <= LARGEST
    return isinstance(value, kind)


def _not(name: str, what: str) -> str:
    return f"{name or 'the content'} is not {what}"
