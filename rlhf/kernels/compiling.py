"""From a C file beside this one to functions, once for each machine."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared"]


@cache
def compiled(name: str) -> ctypes.CDLL | None:
    """The functions of ``name``.c; None where there is no C compiler that can make them.

    They share torch's OpenMP threads: torch's libgomp is in the process already.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    library = (
        None if compiler is None else _library(compiler, Path(__file__).with_name(f"{name}.c"))
    )
    return None if library is None else ctypes.CDLL(str(library))


def has_cpu_flags(*names: str) -> bool:
    """True where /proc/cpuinfo names all these abilities."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and set(names).issubset(cpuinfo.read_text().split())


def _library(compiler: str, source: Path) -> Path | None:
    """The shared library of ``source`` for this CPU; None where the compiler cannot make it."""
    target = _output([compiler, "-march=native", "-Q", "--help=target"])  # names the CPU
    texts = [source.read_bytes(), *(h.read_bytes() for h in sorted(source.parent.glob("*.h")))]
    digest = hashlib.sha256(b"".join(texts) + " ".join(FLAGS).encode() + target)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf"
    library = home / f"{source.stem}-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        home.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=home) as folder:
            made = Path(folder) / library.name
            _output([compiler, *FLAGS, str(source), "-lm", "-o", str(made)])
            if not made.exists():
                return None
            made.replace(library)  # at once: other ranks may be doing the same
    return library


def _output(command: list[str]) -> bytes:
    return subprocess.run(command, capture_output=True, check=False).stdout
