"""Functions of other projects, out of their published wheels, which are never installed.

A wheel is downloaded once and read as an archive. Of one of its files only the named functions and
classes are compiled, without decorators, beside the file's constants and its imports of torch and
the standard library; their other names are given by the caller. So nothing else of the wheel runs,
and none of its dependencies is needed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

VERSIONS = {"TRL": "1.16.0", "verl": "0.9.1", "OpenRLHF": "0.11.2", "AgileRL": "2.58.0"}
# Any interpreter may read these wheels: nothing in them is installed.
WHEELS_FOR = "--only-binary=:all: --implementation=cp --python-version=3.11"
PLATFORMS = "--platform=manylinux1_x86_64 --platform=any"
STANDARD = {"torch", "collections", "enum", "itertools", "math", "typing", "warnings"}


class Wheels:
    """The wheels of ``VERSIONS`` in a folder; without one, their functions are only named."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    @classmethod
    def fetch(cls, folder: Path) -> Wheels:
        """Download the wheels that ``folder`` does not have.

        Raises:
            SystemExit: with exit code 2 if a wheel cannot be downloaded.
        """
        folder.mkdir(parents=True, exist_ok=True)
        wheels = cls(folder)
        for peer, version in VERSIONS.items():
            if wheels.file(peer) is None:
                wanted = f"{peer.lower()}=={version}"
                words = [*WHEELS_FOR.split(), *PLATFORMS.split(), "--no-deps", "--quiet", wanted]
                command = [sys.executable, "-m", "pip", "download", *words]
                done = subprocess.run(
                    [*command, "--dest", str(folder)], check=False, capture_output=True, text=True
                )
                if done.returncode:
                    last = (done.stderr.strip() or "no output").splitlines()[-1]
                    sys.stderr.write(
                        f"{wanted}: the wheel cannot be downloaded ({last}). The comparison needs"
                        f" the network once, or the wheel in {folder}.\n"
                    )
                    raise SystemExit(2)
        return wheels

    def file(self, peer: str) -> Path | None:
        """Return the wheel of a peer; None if it is not there."""
        if self._folder is None:
            return None
        pattern = f"{peer.lower()}-{VERSIONS[peer]}-*.whl"
        return next(iter(sorted(self._folder.glob(pattern))), None)

    def load(
        self, peer: str, path: str, names: str, given: Mapping[str, object] | None = None
    ) -> SimpleNamespace:
        """Return functions and classes of the file that ends with ``path``.

        ``names`` are separated by spaces; a method, ``Class.method``, becomes a function that takes
        self. ``given`` are other names that they use. Without a folder none can be called.
        """
        wanted = names.split()
        short = [name.rpartition(".")[2] for name in wanted]
        if self._folder is None:
            return SimpleNamespace(**dict.fromkeys(short, _absent))
        wheel = self.file(peer)
        assert wheel is not None
        with zipfile.ZipFile(wheel) as archive:
            inside = next(name for name in archive.namelist() if f"/{name}".endswith(f"/{path}"))
            source = archive.read(inside).decode()
        body = [*_context(ast.parse(source)), *_definitions(ast.parse(source), wanted)]
        flags = (
            annotations.compiler_flag
        )  # the import from __future__: annotations are not evaluated
        module = ast.Module(body=body, type_ignores=[])
        code = compile(module, f"{wheel.name}/{inside}", "exec", flags=flags, dont_inherit=True)
        scope: dict[str, object] = {"__name__": f"{peer}:{path}", **(given or {})}
        exec(code, scope)
        return SimpleNamespace(**{name: scope[name] for name in short})


def _absent(*_: object, **__: object) -> None:
    raise LookupError("a function of a wheel was called without the wheel")


def _context(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield imports of torch and the standard library, and constants."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            kept = [each for each in node.names if each.name.split(".")[0] in STANDARD]
            if kept:
                yield ast.copy_location(ast.Import(names=kept), node)
        elif isinstance(node, ast.ImportFrom):
            if not node.level and (node.module or "").split(".")[0] in STANDARD:
                yield node
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            yield node


def _definitions(tree: ast.Module, wanted: list[str]) -> Iterator[ast.stmt]:
    """Yield the definitions of ``wanted``, without decorators.

    Raises:
        LookupError: the file does not define all of them.
    """
    missing = set(wanted)
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else []
        for place, each in [("", node), *((f"{node.name}.", each) for each in inner)]:
            if not isinstance(each, ast.FunctionDef | ast.ClassDef):
                continue
            if place + each.name in missing:
                missing.remove(place + each.name)
                each.decorator_list = []
                yield each
    if missing:
        raise LookupError(f"not defined: {', '.join(sorted(missing))}")
