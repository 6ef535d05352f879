"""What a forked process takes from the request for it, and how it runs a program.

A new interpreter gets its session, cores, directory, environment and files when it is executed. A
process that fork_server.py has forked gets them here, and then runs a program as an interpreter
does, from its command line to its exit code.
"""

import atexit
import ctypes
import os
import runpy
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.pretend_cuda.machine import MACHINES, NAME, pretend

# Variables that glibc reads when a process starts, and their numbers for mallopt(3).
MALLOC_OPTIONS = {
    "MALLOC_TRIM_THRESHOLD_": -1,
    "MALLOC_TOP_PAD_": -2,
    "MALLOC_MMAP_THRESHOLD_": -3,
    "MALLOC_MMAP_MAX_": -4,
}
CLONE_NEWNET = 0x40000000  # from <linux/sched.h>
NETWORK = Path("/proc/self/ns/net")


class Request(NamedTuple):
    """A process to fork; stdin, stdout, stderr and the network namespace travel beside it."""

    words: list[str]
    """Command line after ``python``."""
    cwd: str
    env: dict[str, str]
    new_session: bool
    cores: list[int]
    passed: list[int]
    """Descriptors to inherit, whose numbers are words of the command line."""


def become(
    request: Request, stdin: int, stdout: int, stderr: int, network: int, *passed: int
) -> None:
    """Give this process what a new one takes from its parent."""
    for number, descriptor in zip(request.passed, passed, strict=True):
        request.words[request.words.index(str(number))] = str(descriptor)
    if request.new_session:
        os.setsid()
    else:
        os.setpgid(0, 0)  # a signal to this group must not reach the zygotes
    for number, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, number)
    if not os.path.samestat(os.fstat(network), NETWORK.stat()):
        enter_network(network)
    close([stdin, stdout, stderr, network])
    os.sched_setaffinity(0, request.cores)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    tempfile.tempdir = None  # the zygote may have looked it up
    for name in request.env.keys() & MALLOC_OPTIONS.keys():
        value = min(int(request.env[name]), 2**31 - 1)
        ctypes.CDLL(None).mallopt(MALLOC_OPTIONS[name], value)
    import numpy
    import torch

    numpy.random.seed()  # noqa: NPY002  the state that numpy drew when it was imported
    if "OMP_NUM_THREADS" in request.env:
        torch.set_num_threads(int(request.env["OMP_NUM_THREADS"]))
    if NAME in request.env:  # as sitecustomize.py does when a new interpreter imports torch
        pretend(MACHINES[request.env[NAME]])


def close(descriptors: Sequence[int]) -> None:
    """Close file descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def enter_network(descriptor: int) -> None:
    """Move this process into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")


def run(words: list[str]) -> int:
    """Run ``python words`` and what an interpreter does before it ends; return its exit code."""
    code = 1
    try:
        run_program(words)
        code = 0
    except SystemExit as error:
        is_code = error.code is None or isinstance(error.code, int)
        code = int(error.code or 0) if is_code else 1
        if not is_code:
            sys.stderr.write(f"{error.code}\n")
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    with suppress(Exception):
        threading._shutdown()  # waits for threads that are not daemons
        atexit._run_exitfuncs()
    return code & 0xFF


def run_program(words: list[str]) -> None:
    """Run ``python [-u] FILE ...`` or ``python [-u] -m MODULE ...``."""
    if words[0] == "-u":
        words = words[1:]
        sys.stdout.reconfigure(write_through=True)
    safe = words[0] == "-P" or bool(os.environ.get("PYTHONSAFEPATH"))
    words = words[words[0] == "-P" :]
    place = os.getcwd() if words[0] == "-m" else str(Path(words[0]).resolve().parent)
    more = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [*([] if safe else [place]), *more]
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.modules.pop(words[1], None)  # a new interpreter has not imported its program either
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
