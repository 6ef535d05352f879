"""Read the files of run directories, which may be damaged or come from somebody else.

Only regular files are read: no link, pipe or device. Their sizes, and the depth of what they hold,
are bounded, and every value is checked against its form.

A *form* describes the JSON values that are accepted: a class (``float`` takes any number), a tuple
of forms of which one must fit, ``[form]`` for a list, ``{key: form}`` for an object, or a function
from the name of a key to the form of its value. An object's key that ends in ``?`` may be missing,
and ``OTHERS`` is the form of the keys that the form does not list.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from rlhf.base.errors import CheckpointError
from rlhf.base.packaged_yaml import read_yaml_beside

Form = Any  # describes the types that a JSON value may have; _find_fault compares them
OTHERS = "*"
# Errors of os.open for a path that is no regular file.
NOT_REGULAR = {errno.ELOOP: "it is a link", errno.EISDIR: "it is a folder"}
NOT_REGULAR |= {errno.ENXIO: "it is not a regular file"}
LARGEST_NUMBER = 1e60  # largest absolute value accepted in a file, because charts square numbers

TYPE_NAMES = {str: "a text", float: "a number", int: "a whole number", bool: "true or false"}
TYPE_NAMES |= {type(None): "null"}
NUMBER_TYPES: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float)}  # accepted types
MAYBE_FLOAT = (float, type(None))  # null stands for a number that is not finite
# Names of results that are mappings of numbers.
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


# The forms that words in stored_files.yaml stand for.
KINDS: dict[str, Form] = {
    "text": str,
    "number": float,
    "whole": int,
    "flag": bool,
    "null": type(None),
    "measure": _measure_form,
}


def _build_form(words: Any) -> Form:
    if isinstance(words, dict):
        return {key: _build_form(item) for key, item in words.items()}
    if isinstance(words, list):
        return [_build_form(item) for item in words]
    kinds = tuple(KINDS[word] for word in words.split(" or "))
    return kinds if kinds[1:] else kinds[0]


FORMS: dict[str, Form] = _build_form(read_yaml_beside(__file__, "stored_files.yaml"))
PHASES = FORMS["phases"]  # the forms of PHASE/result.json by phase
LINE, MEASURED = FORMS["line"], FORMS["measured"]


@dataclass(frozen=True, eq=False)
class StoredFile(os.PathLike[str]):
    """A JSON or JSONL file that runs write: its name in its folder, and the form of its values.

    For example, ``folder / METRICS`` is the path of METRICS in ``folder``.
    """

    name: str
    form: Form

    def __fspath__(self) -> str:
        return self.name

    def __str__(self) -> str:
        return self.name

    def read(self, folder: Path) -> dict[str, Any] | None:
        """Return the JSON object of the file in ``folder``; None if there is no file."""
        content: dict[str, Any] | None = read_json(folder / self, self.form)
        return content

    def read_if_intact(self, folder: Path) -> dict[str, Any] | None:
        """Return the JSON object of the file in ``folder``; None if it is missing or damaged."""
        with suppress(DamagedFileError):
            return self.read(folder)
        return None

    def read_lines(self, folder: Path) -> Iterator[dict[str, Any]]:
        """Yield the object of each line of the JSONL file in ``folder``."""
        return read_json_lines(folder / self, self.form)

    def follow(self, folder: Path) -> GrowingFile:
        """Return the JSONL file in ``folder`` to read while it grows."""
        return GrowingFile(folder / self, self.form)


def _stored_file(name: str) -> StoredFile:
    return StoredFile(name, FORMS["files"][name])


METRICS, SAMPLES, ALARMS = map(_stored_file, ("metrics.jsonl", "samples.jsonl", "alarms.jsonl"))
PLAN, INPUTS, ATTEMPTS = map(_stored_file, ("plan.json", "inputs.json", "attempts.json"))
# A phase's folder has a result.json of another form (PHASES), and a manifest.json.
RESULT, PHASE_MANIFEST = map(_stored_file, ("result.json", "manifest.json"))
DIGESTS, HELD_OUT = map(_stored_file, ("digests.jsonl", "ppo/held_out.json"))
BUNDLE = _stored_file("bundle.json")  # only an imported run has it
EVALUATION = _stored_file("evaluation/evaluation.json")
ANSWERS, PAIRS = map(_stored_file, ("evaluation/answers.jsonl", "evaluation/pairs.jsonl"))
MANIFEST = PHASE_MANIFEST.name  # name of the manifest of phases, checkpoints and cached tokens
Identity = list[int | str]  # size in bytes, and SHA-256
MOST_BYTES = 2**31  # most bytes of a file that is read as a whole
PARSE_LIMIT = 2**26  # most bytes of a text, of a JSON file and of a line of JSONL
TAIL_BYTES = 2**16  # bytes at the end of a log that hold its last lines
DEEPEST = 32  # most levels of nested lists and objects


class DamagedFileError(CheckpointError):
    """The error for a file that no run can have written, or that cannot be read."""

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


def read_bytes(path: Path, *, start: int = 0, most: int = MOST_BYTES) -> bytes | None:
    """Return the content of a file from byte ``start`` on; None if there is no file.

    Raises:
        DamagedFileError: if it has more than ``most`` bytes, cannot be read, or is no regular file.
            A link is refused because it could bring any file into a report.
    """
    with suppress(FileNotFoundError, NotADirectoryError), _open_to_read(path) as file:
        size = max(0, os.fstat(file.fileno()).st_size - start)
        if size > most:
            raise DamagedFileError(path, f"it has more than {most:,} bytes")
        file.seek(start)
        return file.read(size)
    return None


@contextmanager
def _open_to_read(path: Path) -> Iterator[BufferedReader]:
    try:
        with open(path, "rb", opener=open_regular_file) as file:
            yield file
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise DamagedFileError(path, str(error.strerror)) from error


def read_tail(path: Path) -> bytes:
    """Return the last bytes, up to ``TAIL_BYTES``, of a file; empty if there is no regular file."""
    with suppress(OSError, DamagedFileError):
        return read_bytes(path, start=max(0, path.stat().st_size - TAIL_BYTES)) or b""
    return b""


def read_stored_text(path: Path, *, most: int = PARSE_LIMIT) -> str | None:
    """Return the text of a file; None if there is no file.

    Raises:
        DamagedFileError: if ``read_bytes`` raises it, or the text is not UTF-8.
    """
    if (content := read_bytes(path, most=most)) is None:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFileError(path, f"it is not UTF-8 ({error.reason})") from error


def read_json(path: Path, form: Form, *, keeps_nan: bool = False) -> Any:
    """Return the value in a JSON file, checked against ``form``; None if there is no file.

    Numbers that are not finite become None, unless ``keeps_nan``.
    """
    content = read_bytes(path, most=PARSE_LIMIT)
    return None if content is None else parse_json(path, content, form, keeps_nan=keeps_nan)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise a DamagedFileError if it is missing or {}."""
    if not (content := read_json(path, {})):
        raise DamagedFileError(path, "it is missing or empty")
    return dict(content)


def read_json_lines(path: Path, form: Form) -> Iterator[Any]:
    """Yield the checked value of each line of JSONL; skip empty lines and a cut-off last line."""
    return (value for _, value in read_json_lines_with_bytes(path, form))


def read_json_lines_with_bytes(path: Path, form: Form) -> Iterator[tuple[bytes, Any]]:
    """Yield the bytes of each line, without its end, and the value from ``read_json_lines``."""
    for number, line in enumerate(_read_lines(path), start=1):
        if line.endswith(b"\n"):
            if line != b"\n":
                yield line[:-1], parse_json(path, line[:-1], form, f"line {number}: ")
            continue
        value = None
        with suppress(DamagedFileError):  # the process was killed while it wrote the line
            value = parse_json(path, line, form)
        if value is not None:
            yield line, value


def _read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines that a file has now; only "\\n" ends a line: U+2028 in a text does not."""
    with suppress(FileNotFoundError, NotADirectoryError), _open_to_read(path) as file:
        bytes_left = os.fstat(file.fileno()).st_size
        while bytes_left and (line := file.readline(min(bytes_left, PARSE_LIMIT + 1))):
            if len(line) > PARSE_LIMIT:
                raise DamagedFileError(path, f"it has a line of more than {PARSE_LIMIT:,} bytes")
            bytes_left -= len(line)
            yield line


def parse_json(
    path: Path, content: bytes, form: Form, place: str = "", *, keeps_nan: bool = False
) -> Any:
    """Return the checked value of the JSON ``content``; reasons in errors begin with ``place``."""
    try:
        text = content.decode("utf-8")
        value = json.loads(text, parse_constant=float if keeps_nan else lambda _: None)
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise DamagedFileError(path, f"{place}not JSON in UTF-8 ({reason})") from error
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value, DEEPEST):
        raise DamagedFileError(path, f"{place}it has more than {DEEPEST} levels")
    if (fault := _find_fault(value, form)) is not None:
        subject = "the content" if fault.startswith(" ") else ""
        raise DamagedFileError(path, place + subject + fault.removeprefix("."))
    if form is METRICS.form:
        return {_renamed_metrics().get(name, name): number for name, number in value.items()}
    return value


@cache
def _renamed_metrics() -> dict[str, str]:
    """Return the present names of metrics by their names in older versions."""
    config = Path(__file__).parents[1] / "config" / "history.py"
    versions = read_yaml_beside(str(config), "history.yaml")["metrics"]["renamed"]
    return {old: new for rows in versions.values() for old, new in rows.items()}


def _is_deep(value: Any, levels: int) -> bool:
    """Return True if lists and objects are nested deeper than ``levels``."""
    if not isinstance(value, list | dict):
        return False
    items = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deep(item, levels - 1) for item in items)


def _find_fault(value: Any, form: Form) -> str | None:
    """Return where and how ``value`` differs from ``form``; None if it fits ``form``."""
    if isinstance(form, tuple):
        faults = [_find_fault(value, choice) for choice in form]
        return None if None in faults else faults[0]
    if isinstance(form, dict):
        return _find_object_fault(value, form) if isinstance(value, dict) else " is not an object"
    if isinstance(form, list):
        if not isinstance(value, list):
            return " is not a list"
        if len(form) > 1 and len(form) != len(value):
            return f" is not a list of {len(form)}"
        forms = form if len(form) > 1 else form * len(value)
        item_faults = enumerate(map(_find_fault, value, forms))
        return next((f"[{number}]{fault}" for number, fault in item_faults if fault), None)
    return None if _has_type(value, form) else f" is not {TYPE_NAMES[form]}"


def _find_object_fault(value: dict[str, Any], form: dict[str, Form]) -> str | None:
    for key in form:
        if not key.endswith("?") and key != OTHERS and key not in value:
            return f".{key} is missing"
    for key, item in value.items():
        key_form = form.get(key, form.get(f"{key}?", form.get(OTHERS)))
        if isinstance(key_form, FunctionType):
            key_form = key_form(key)
        if key_form is not None and (fault := _find_fault(item, key_form)):
            return f".{key}{fault}"
        if key.endswith("_before") and f"{key[:-6]}after" not in value:
            return f".{key[:-6]}after is missing"
    return None


def _has_type(value: Any, kind: type) -> bool:
    if kind in NUMBER_TYPES:
        is_number = isinstance(value, NUMBER_TYPES[kind])
        return is_number and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER
    return isinstance(value, kind)


def find_entries(folder: Path, pattern: str) -> list[Path]:
    """Return the paths in ``folder``, of any file type, that match ``pattern``, sorted."""
    return sorted(folder.glob(pattern))


def find_files(folder: Path, pattern: str) -> list[Path]:
    """Return the regular files in ``folder`` that match ``pattern``; do not follow links."""
    return [
        path
        for path in find_entries(folder, pattern)
        if stat.S_ISREG(path.lstat().st_mode)
        and not any((folder / each).is_symlink() for each in path.relative_to(folder).parents[:-1])
    ]


def find_folders_with(name: str, place: Path) -> Iterator[Path]:
    """Yield ``place`` if it holds a file ``name``, otherwise the folders below it that do, sorted.

    Folders inside a yielded folder, and links, are not searched.
    """
    for folder, below, files in os.walk(place):
        below.sort()
        if name in files:
            below.clear()
            yield Path(folder)


def folder_size(folder: Path) -> int:
    """Return the size of the regular files in a folder; files may be removed meanwhile."""
    total = 0
    for path in find_entries(folder, "**/*"):
        with suppress(OSError):
            status = path.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def copy_regular_files(
    source: Path,
    target: Path,
    *,
    copy_function: Callable[[str, str], object] = shutil.copy2,
    skip: tuple[str, ...] = (),
) -> None:
    """Copy the folder ``source`` to ``target``, except names that match a pattern in ``skip``.

    Raises:
        DamagedFileError: if ``source`` or something in it is a link, a pipe or a device.
    """
    for path in (source, *source.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise DamagedFileError(path, "only regular files are copied")
    ignore = shutil.ignore_patterns(*skip)
    shutil.copytree(source, target, copy_function=copy_function, ignore=ignore, dirs_exist_ok=True)


def file_identity(path: Path, *, flush: bool = False) -> Identity:
    """Return the size and the SHA-256 of a file; with ``flush`` also flush it to the drive."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if flush:
            os.fsync(file.fileno())
        return [file.tell(), digest]


def file_identities(folder: Path, *, skip: Container[str] = ()) -> dict[str, Identity]:
    """Return, by path, size and SHA-256 of files of ``iterate_files``; flush them to the drive."""
    return {name: file_identity(folder / name, flush=True) for name in iterate_files(folder, skip)}


def check_files(
    folder: Path, files: Mapping[str, Identity], *, skip: Container[str] = (MANIFEST,)
) -> None:
    """Raise a CheckpointError unless ``folder`` has exactly ``files``, apart from ``skip``."""
    if odd := sorted(set(iterate_files(folder, skip)) ^ set(files)):
        raise CheckpointError(f"{folder / odd[0]} is missing, or not in {MANIFEST}.")
    for name, expected in files.items():
        path = folder / name
        if path.stat().st_size != expected[0] or file_identity(path) != expected:
            raise CheckpointError(f"{path} is damaged: it is not what was written.")


def iterate_files(folder: Path, skip: Container[str] = ()) -> Iterator[str]:
    """Yield the relative paths of the regular files in ``folder``; skip hidden files and links.

    Skip also a file if ``skip`` has its relative path, or the name of its top-level folder.
    """
    for path in find_files(folder, "**/*"):
        parts = path.relative_to(folder).parts
        name = "/".join(parts)
        is_hidden = any(part.startswith(".") for part in parts)
        if not (is_hidden or parts[0] in skip or name in skip):
            yield name


KEPT_BYTES = 256  # last bytes of a read; if they differ at the next read, the file was replaced


class NewLines(NamedTuple):
    """The values of new lines; if ``is_restarted``, values of earlier reads no longer count."""

    values: list[Any]
    is_restarted: bool


class GrowingFile:
    """A JSONL file that is read line by line while it grows.

    Reads compare bytes, since locks and events do not work on every shared file system. A last
    line without a line end is left for the next read. A file that was cut or replaced, as by a
    resumed run, is read again from its start. ``fault`` is the message of a damaged file or line.
    """

    def __init__(self, path: Path, form: Form) -> None:
        self._path, self._form = path, form
        self._restart()

    def _restart(self) -> None:
        self._position = 0  # number of bytes that were read
        self._tail = b""  # the last of these bytes
        self._num_lines = 0
        self.fault: str | None = None

    def read(self) -> NewLines:
        """Return the values of the complete lines since the last read; [] if there is no file."""
        content = self._read_from(self._position - len(self._tail))
        is_restarted = not content.startswith(self._tail)
        if is_restarted:
            self._restart()
            content = self._read_from(0)
        new = content[len(self._tail) : content.rfind(b"\n") + 1]
        self._position += len(new)
        self._tail = (self._tail + new)[-KEPT_BYTES:]
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
