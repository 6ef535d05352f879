"""Compile a C file of this folder for this machine's CPU, once, and load its functions.

A kernel is optional: if it cannot be compiled or loaded, the run prints the reason and torch
computes instead.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rlhf.base.atomic import replace_atomically
from rlhf.base.cpu import MAX_ISA, Isa, cache_folder, read_cpu, usable_isa
from rlhf.base.hashing import sha256_of
from rlhf.base.trust import keep_others_from_writing, make_own_folder, require_trusted
from rlhf.kernels import kernel_checks

# The lowest ISA level for which each kernel can be compiled.
LOWEST_ISA = dict.fromkeys(("adamw", "logprobs", "softmax", "decode"), Isa.avx2)
X86_ONLY = {"logprobs", "softmax", "decode"}  # kernels with x86 instructions
BF16_ONLY = {"adamw"}  # kernels that are used only with bf16 weights
FLAGS = ["-O3", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared"]


class Kernel(NamedTuple):
    """The compiled functions of a C file; ``library`` is None if they are missing.

    ``reason`` explains why they are missing, or why their ISA level is lower than the CPU's.
    """

    library: ctypes.CDLL | None
    reason: str | None = None


class _Failure(Exception):
    """The reason why a kernel cannot be compiled or loaded."""


def compile_kernel(name: str, *, half: bool = True) -> ctypes.CDLL | None:
    """Return the functions of ``name``.c, or None if this machine cannot run or compile them.

    They work on bf16 numbers, or on fp32 numbers if ``half`` is False, unless a function has an
    argument for the type. They share OpenMP threads with torch, whose libgomp is already loaded.
    """
    return load_kernel(name, usable_isa(), half=half).library


def describe_kernels(*, half: bool) -> str:
    """Return one line: the kernels of a bf16 (``half``) or fp32 run, and why others are missing.

    Kernels that are not in the cache are compiled first.
    """
    isa = usable_isa()
    kernels = {
        name: load_kernel(name, isa, half=half)
        for name, needed in LOWEST_ISA.items()
        if needed <= read_cpu().isa and (half or name not in BF16_ONLY)
    }
    running = [name for name, each in kernels.items() if each.library is not None]
    reasons: dict[str, list[str]] = {}
    for name, each in kernels.items():
        if each.reason is not None:
            reasons.setdefault(each.reason, []).append(name)
    parts = [f"{', '.join(running) or 'none'} in C ({isa.name})"]
    for reason, names in reasons.items():
        lack = f"no {isa.name} for" if names[0] in running else "torch instead of"
        parts.append(f"{lack} {', '.join(names)}: {reason}")
        if names[0] not in running:
            kernel_checks.note_replaced(names[0], f"kernels: {parts[-1]}")
    return f"kernels: {'; '.join(parts)}"


@cache
def load_kernel(name: str, isa: Isa, *, half: bool = True) -> Kernel:
    """Return the functions of ``name``.c for ``isa``, or for the next lower level that works."""
    if isa < LOWEST_ISA[name]:
        cap = os.environ.get(MAX_ISA)
        return Kernel(None, f"{MAX_ISA}={cap}" if cap else f"needs {LOWEST_ISA[name].name}")
    if name in X86_ONLY and "asimd" in read_cpu().flags:
        return Kernel(None, "needs an x86 CPU")
    try:
        library = _load_library(Path(__file__).with_name(f"{name}.c"), isa, half)
    except _Failure as failure:  # gcc may be older than the CPU, and lack its instructions
        return _next_lower_kernel(name, isa, half, str(failure))
    enable = getattr(library, f"{name}_enable", None)
    if enable is not None and not enable():
        return _next_lower_kernel(name, isa, half, "Linux does not let this process use AMX")
    return Kernel(library)


def _next_lower_kernel(name: str, isa: Isa, half: bool, reason: str) -> Kernel:
    """Return the kernel for the level below ``isa``, with the ``reason`` why ``isa`` failed.

    The kernel has no library if ``isa`` is the lowest level of the kernel ``name``.
    """
    if isa == LOWEST_ISA[name]:
        return Kernel(None, reason)
    return load_kernel(name, Isa(isa - 1), half=half)._replace(reason=reason)


def _load_library(source: Path, isa: Isa, half: bool) -> ctypes.CDLL:
    """Load the library from the cache; compile it first if it is missing.

    If the cache cannot be used, compile into a temporary folder, for this process only.
    """
    options = [*FLAGS, *_isa_options(isa), f"-DISA={isa.name.upper()}", f"-DHALF={int(half)}"]
    texts = [source.read_bytes(), *(h.read_bytes() for h in sorted(source.parent.glob("*.h")))]
    # The CPU's name separates machines that share a home folder but have different CPUs.
    key = f"{options} {read_cpu().name} {sorted(read_cpu().flags)}"
    digest = sha256_of([*texts, key.encode()])[:16]
    library = cache_folder() / f"{source.stem}-{digest}.so"
    try:
        make_own_folder(library.parent)
        if not library.exists():
            with replace_atomically(library, shared=True) as target:  # many ranks may write it
                _compile_library(source, target, options)
                keep_others_from_writing(target)
        require_trusted(library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        unusable = f"{library.parent} cannot hold compiled code ({_error_text(error)})"
    try:
        with TemporaryDirectory(prefix="rlhf-") as folder:  # a loaded library outlives its file
            target = Path(folder) / library.name
            _compile_library(source, target, options)
            return ctypes.CDLL(str(target))
    except OSError as error:
        raise _Failure(
            f"{unusable}, and neither can the temporary folder ({_error_text(error)}); set "
            "RLHF_CACHE to a folder that can be written and is not mounted noexec"
        ) from error


def _error_text(error: OSError) -> str:
    """Return the text of an error; drop the path that begins the dynamic linker's texts."""
    return error.strerror or str(error).rpartition(": ")[2]


def _isa_options(isa: Isa) -> list[str]:
    """Return the gcc options that select this CPU's instructions, up to the level ``isa``."""
    is_capped = isa < min(read_cpu().isa, Isa.avx512_bf16)  # gcc uses no AMX by itself
    return ["-march=x86-64-v3" if is_capped else "-march=native"]


def _compile_library(source: Path, target: Path, options: list[str]) -> None:
    command = [_find_gcc(), *options, str(source), "-lm", "-o", str(target)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode or not target.exists():
        lines = [line for line in run.stderr.splitlines() if "error" in line] or ["no message"]
        raise _Failure(f"{command[0]} failed with exit code {run.returncode} ({lines[0].strip()})")


def _find_gcc() -> str:
    """Return the path of gcc, which may be named gcc or cc.

    clang is refused: its OpenMP threads would compete with torch's threads for the same cores.
    """
    paths = [path for name in ("gcc", "cc") if (path := shutil.which(name)) is not None]
    for path in paths:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if "Free Software Foundation" in run.stdout:
            return path
    if paths:
        raise _Failure(f"{paths[0]} is not gcc, and only gcc shares torch's threads; install gcc")
    raise _Failure("there is no C compiler; install gcc")
