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
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.errors import CheckpointError
from rlhf.base.packaged_yaml import read_yaml_beside

Form = Any  # describes the types that a JSON value may have; _find_fault compares them
OTHERS = "*"
# Errors of os.open for a path that is no regular file.
NOT_REGULAR = {errno.ELOOP: "it is a link", errno.EISDIR: "it is a folder"}
NOT_REGULAR |= {errno.ENXIO: "it is not a regular file"}
LARGEST = 1e60  # largest absolute value accepted in a file, because charts square numbers

NAMES = {str: "a text", float: "a number", int: "a whole number", bool: "true or false"}
NAMES |= {type(None): "null"}
MAYBE_FLOAT = (float, type(None))  # null stands for a number that is not finite
# Results that are mappings.
MAPPINGS = ("minimal_pairs", "groups", "member_accuracies", "bias_onsets")


def _measure_form(name: str) -> Form:
    """Return the form (the expected types) of the value ``name`` in a phase's result."""
    if name.endswith("_ci"):
        return [MAYBE_FLOAT, MAYBE_FLOAT]
    if name == "judge_gains":
        return {OTHERS: [MAYBE_FLOAT, MAYBE_FLOAT]}
    if "_parts_" in name or name.startswith("failures_") or name in MAPPINGS:
        return {OTHERS: MAYBE_FLOAT}
    return MAYBE_FLOAT


# The words of stored_files.yaml.
KINDS: dict[str, Form] = {
    "text": str,
    "number": float,
    "whole": int,
    "flag": bool,
    "null": type(None),
    "measure": _measure_form,
}


def _build_form(given: Any) -> Form:
    if isinstance(given, dict):
        return {key: _build_form(each) for key, each in given.items()}
    if isinstance(given, list):
        return [_build_form(each) for each in given]
    kinds = tuple(KINDS[word] for word in given.split(" or "))
    return kinds if kinds[1:] else kinds[0]


FORMS: dict[str, Form] = _build_form(read_yaml_beside(__file__, "stored_files.yaml"))
PHASES = FORMS["phases"]
RESULT = FORMS["result"] | {"phases": {f"{name}?": form for name, form in PHASES.items()}}
LINE, METRICS, DIGEST, ALARM, SAMPLE = map(
    FORMS.__getitem__, ("line", "metrics", "digest", "alarm", "sample")
)
MEASURED, MANIFEST_FORM, HELD_OUT = map(FORMS.__getitem__, ("measured", "manifest", "held_out"))
ANSWER, PAIR, EVALUATED = map(FORMS.__getitem__, ("answer", "pair", "evaluated"))


class DamagedFileError(CheckpointError):
    """The error for a file of a run directory whose content differs from what runs write."""

    def __init__(self, path: Path, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{path} is damaged, or no run wrote it: {reason}. Restore the file from a copy, or "
            "remove it if you can do without it"
        )


def open_regular_file(name: str, flags: int) -> int:
    """Open a regular file, never a link, pipe or device; pass this to ``open`` as ``opener``.

    Raises:
        DamagedFileError: if ``name`` is a link, folder, pipe or device.
    """
    try:
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in NOT_REGULAR:
            raise
        raise DamagedFileError(Path(name), NOT_REGULAR[error.errno]) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedFileError(Path(name), "it is not a regular file")
    return descriptor


def read_bytes(path: Path, *, start: int = 0) -> bytes | None:
    """Return the content of a file from byte ``start`` on; None if there is no file.

    Raises:
        DamagedFileError: if it is not a regular file. A link is refused because it could bring
            any file into a report.
    """
    try:
        with open(path, "rb", opener=open_regular_file) as file:
            file.seek(start)
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedFileError(path, str(error.strerror)) from error


def copy_regular_files(
    source: Path,
    target: Path,
    *,
    copy_function: Callable[[str, str], object] = shutil.copy2,
    skip: tuple[str, ...] = (),
) -> None:
    """Copy the folder ``source`` to ``target``, except what has a name like a pattern in ``skip``.

    Raises:
        DamagedFileError: if ``source`` or something in it is a link, a pipe or a device.
    """
    for path in (source, *source.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise DamagedFileError(path, "only regular files are copied")
    left_out = shutil.ignore_patterns(*skip)
    shutil.copytree(
        source, target, copy_function=copy_function, ignore=left_out, dirs_exist_ok=True
    )


def read_stored_text(path: Path) -> str | None:
    """Return the text of a file; None if there is none.

    Raises:
        DamagedFileError: if it is not a regular file, or its text is not UTF-8.
    """
    if (content := read_bytes(path)) is None:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFileError(path, f"it is not UTF-8 ({error.reason})") from error


def read_json(path: Path, form: Form) -> Any:
    """Return the value in a JSON file, checked against ``form``; None if there is no file."""
    content = read_bytes(path)
    return None if content is None else parse_json(path, content, form, "")


def read_json_lines(path: Path, form: Form) -> Iterator[Any]:
    """Yield the value of each line in a JSONL file, checked; skip an incomplete last line."""
    return (value for _, value in read_json_lines_with_bytes(path, form))


def read_json_lines_with_bytes(path: Path, form: Form) -> Iterator[tuple[bytes, Any]]:
    """Yield the bytes, without line end, and the value of each line of ``read_json_lines``."""
    # Lines end only at "\n": str.splitlines also splits at U+2028, which JSON strings may contain.
    *whole, torn = (read_bytes(path) or b"").split(b"\n")
    for number, line in enumerate(whole, start=1):
        if line:
            yield line, parse_json(path, line, form, f"line {number}: ")
    value = None
    with suppress(DamagedFileError):  # no line end: the process was killed while it wrote the line
        value = parse_json(path, torn, form, "")
    if value is not None:
        yield torn, value


def parse_json(path: Path, content: bytes, form: Form, place: str) -> Any:
    """Return the value of the JSON ``content``, checked against ``form``; errors name ``place``."""
    try:
        text = content.decode("utf-8")
        value = json.loads(text, parse_constant=lambda _: None)  # NaN, Infinity: null
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise DamagedFileError(path, f"{place}not JSON in UTF-8 ({reason})") from error
    require_form(path, value, form, place)
    return value


def require_form(path: Path, value: Any, form: Form, place: str = "") -> None:
    """Raise a DamagedFileError that names ``place`` unless ``value`` of a file has the form."""
    if (fault := _find_fault(value, form, "")) is not None:
        raise DamagedFileError(path, place + fault)


def _find_fault(value: Any, form: Form, name: str) -> str | None:
    """Return how ``value``, whose dotted path is ``name``, differs from ``form``, or None."""
    if callable(form) and not isinstance(form, type):
        form = form(name.rpartition(".")[2])
    if isinstance(form, tuple):
        faults = [_find_fault(value, each, name) for each in form]
        return None if None in faults else faults[0]
    if isinstance(form, dict):
        return (
            _find_object_fault(value, form, name)
            if isinstance(value, dict)
            else _describe_mismatch(name, "an object")
        )
    if isinstance(form, list):
        if not isinstance(value, list):
            return _describe_mismatch(name, "a list")
        if len(form) > 1 and len(form) != len(value):
            return _describe_mismatch(name, f"a list of {len(form)}")
        forms = form if len(form) > 1 else form * len(value)
        items = (
            _find_fault(v, f, f"{name}[{i}]")
            for i, (v, f) in enumerate(zip(value, forms, strict=True))
        )
        return next((fault for fault in items if fault), None)
    return None if _has_type(value, form) else _describe_mismatch(name, NAMES[form])


def _find_object_fault(value: dict[str, Any], form: dict[str, Form], name: str) -> str | None:
    prefix = f"{name}." if name else ""
    for key in form:
        if not key.endswith("?") and key != OTHERS and key not in value:
            return f"{prefix}{key} is missing"
    for key, each in value.items():
        of_key = form.get(key, form.get(f"{key}?", form.get(OTHERS)))
        if of_key is not None and (fault := _find_fault(each, of_key, f"{prefix}{key}")):
            return fault
        if key.endswith("_before") and f"{key[:-6]}after" not in value:
            return f"{prefix}{key[:-6]}after is missing"
    return None


def _has_type(value: Any, kind: type) -> bool:
    if kind in {int, float}:
        is_number = isinstance(value, int | (float if kind is float else int))
        return is_number and not isinstance(value, bool) and abs(value) <= LARGEST
    return isinstance(value, kind)


def _describe_mismatch(name: str, what: str) -> str:
    return f"{name or 'the content'} is not {what}"


TAIL = 256  # last bytes of a read; if they differ at the next read, the file was replaced


class NewLines(NamedTuple):
    """The values of new lines; if ``is_restarted``, values of earlier reads no longer count."""

    values: list[Any]
    is_restarted: bool


class GrowingFile:
    """A JSONL file that is read line by line while it grows.

    Reads compare bytes, since locks and events do not work on every shared file system. A last
    line without a line end is left for the next read. A file that was cut or replaced, as by a
    resumed run, is read again from its start. ``fault`` describes the first damaged line.
    """

    def __init__(self, path: Path, form: Form) -> None:
        self._path, self._form = path, form
        self._restart()

    def _restart(self) -> None:
        self._place = 0  # number of bytes that were read
        self._tail = b""  # the last of these bytes
        self._num_lines = 0
        self.fault: str | None = None

    def read(self) -> NewLines:
        """Return the values of the complete lines since the last read; none if there is no file."""
        content = self._read_from(self._place - len(self._tail))
        is_restarted = not content.startswith(self._tail)
        if is_restarted:
            self._restart()
            content = self._read_from(0)
        new = content[len(self._tail) : content.rfind(b"\n") + 1]
        self._place += len(new)
        self._tail = (self._tail + new)[-TAIL:]
        return NewLines(
            [v for line in new.split(b"\n")[:-1] for v in self._parse(line)], is_restarted
        )

    def _read_from(self, start: int) -> bytes:
        try:
            return read_bytes(self._path, start=start) or b""
        except DamagedFileError as error:  # the path is a link, or no regular file
            self.fault = str(error)
            return b""

    def _parse(self, line: bytes) -> list[Any]:
        """Return the value of a line in a list, which is empty for an empty or damaged line."""
        self._num_lines += 1
        try:
            place = f"line {self._num_lines}: "
            return [parse_json(self._path, line, self._form, place)] if line else []
        except DamagedFileError as error:
            self.fault = self.fault or str(error)
            return []
