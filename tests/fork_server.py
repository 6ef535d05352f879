"""Python processes that start with torch, transformers and deepspeed already imported.

Importing them takes seconds of CPU time, and the tests start hundreds of processes. A *zygote* is a
process that has imported them and has done nothing else. ``WarmPopen`` is ``subprocess.Popen``,
except that a zygote forks what would otherwise be a new interpreter:

    pytest worker ......... starts its zygote with the first WarmPopen
      |-- zygote
      `-- launch.py ....... forked from the zygote, a child of the pytest worker all the same
            |-- zygote .... forked before launch.py began, so it is as clean as the first
            `-- ranks ..... forked from it when torchrun's agent calls Popen, here WarmPopen

Each process is forked from a zygote that runs nothing, so nothing of another test can reach it.
What an interpreter decides when it starts cannot be forked: such processes are executed as usual
(see ``is_warm``). A test of start-up itself must use ``subprocess``.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import inspect
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

from tests.quick_hydra import compose_quickly

ROOT = Path(__file__).parents[1]

# Most modules that a run imports. None of them may start a thread: it would not survive a fork.
MODULES = [
    "rlhf.runtime.launcher",
    "rlhf.runtime.rank",
    "datasets",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # by its engine; it imports torch's compiler
    "peft",
    "hydra._internal.hydra",
    "hydra._internal.core_plugins.basic_launcher",
    "hydra._internal.core_plugins.basic_sweeper",
    "rich.console",
    "rich.progress",
    "rich.table",
    "torch.distributed.run",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.opt.modeling_opt",
    "transformers.models.qwen3.modeling_qwen3",
]
# A zygote's own settings. launch.py makes the first one in the processes that users start; without
# the others numpy and pyarrow start threads when they are imported.
SETTINGS = {
    "GOMP_SPINCOUNT": "10000",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
# Variables that an interpreter or a library reads when it starts, unlike those of a run.
READ_AT_START = re.compile(
    r"(DS|GOMP|HF|JE|KMP|LD|MKL|ONEDNN|OPENBLAS|TRANSFORMERS|XDG)_|PYTHON(?!(SAFE)?PATH)|HOME$"
)
PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>
# Variables that glibc reads when a process starts, and their numbers for mallopt(3).
MALLOC_OPTIONS = {
    "MALLOC_TRIM_THRESHOLD_": -1,
    "MALLOC_TOP_PAD_": -2,
    "MALLOC_MMAP_THRESHOLD_": -3,
    "MALLOC_MMAP_MAX_": -4,
}
CLONE_NEWNET = 0x40000000  # from <linux/sched.h>
MADV_COLLAPSE = 25  # from <linux/mman.h>, since Linux 6.1
HUGE_PAGE = 2**21  # bytes
NETWORK = Path("/proc/self/ns/net")
LONGEST_REQUEST = 200_000  # bytes


class Request(NamedTuple):
    """A process to fork; stdin, stdout, stderr and the network namespace travel beside it."""

    words: list[str]
    """Command line after ``python``."""
    cwd: str
    env: dict[str, str]
    new_session: bool
    cores: list[int]


def is_warm(command: Sequence[object], env: Mapping[str, str], imported_with: str) -> bool:
    """Return whether forking gives the process that executing ``command`` would give."""
    python, *words = map(str, command)
    words = words[1:] if words[:1] == ["-u"] else words
    is_program = words[:1] == ["-m"] or (bool(words) and words[0].endswith(".py"))
    return python == sys.executable and is_program and read_at_start(env) == imported_with


def read_at_start(env: Mapping[str, str]) -> str:
    """Return the variables in ``env`` that must be the same in a zygote and in its children."""
    return str(sorted(pair for pair in (SETTINGS | env).items() if READ_AT_START.match(pair[0])))


class Zygote:
    """A process that forks others, seen from the process whose children they become."""

    def __init__(self, channel: socket.socket, pid: int, imported_with: str) -> None:
        self.imported_with = imported_with
        self._channel = channel
        self._pid = pid
        self._lock = threading.Lock()
        # A forked process loses its parent on purpose, see serve(); then it becomes our child.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

    @classmethod
    def execute(cls) -> Zygote:
        """Start a zygote that imports everything itself."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"from tests.fork_server import be_zygote; be_zygote({theirs.fileno()})"
        env = SETTINGS | os.environ
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=ROOT,
                env=env | {"PYTHONPATH": f"{ROOT}:{env.get('PYTHONPATH', '')}"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for pytest, which ends the zygote
            )
        process.returncode = 0  # it ends with this process: Popen need not warn that it runs
        return cls(ours, process.pid, read_at_start(env))

    def fork(self, request: Request, descriptors: list[int]) -> int:
        """Fork a process; return its id, which is that of a child of this process."""
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
            answer = self._channel.recv(100)
        if not answer:
            raise RuntimeError("the zygote has ended; its error stands above")
        return int(answer)

    def end(self) -> None:
        """End the zygote, so that no process has to wait for it later."""
        self._channel.close()
        os.waitpid(self._pid, 0)


class WarmPopen(subprocess.Popen):
    """``subprocess.Popen`` that forks Python programs from a zygote wherever it can."""

    zygote: ClassVar[Zygote | None] = None

    def _execute_child(self, *args: Any) -> None:
        # The one part of Popen that makes the process; its arguments differ between Pythons.
        given = inspect.signature(super()._execute_child).bind(*args).arguments
        command, env = given["args"], dict(given["env"] or os.environ)
        zygote = WarmPopen.zygote
        imported_with = zygote.imported_with if zygote else read_at_start(os.environ)
        plain = not (given["shell"] or given["preexec_fn"] or given["pass_fds"])
        if isinstance(command, str | bytes | os.PathLike) or not (
            plain and is_warm(command, env, imported_with)
        ):
            super()._execute_child(*args)
            return
        if zygote is None:
            zygote = WarmPopen.zygote = Zygote.execute()
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        request = Request(
            words=[os.fspath(word) for word in command[1:]],
            cwd=str(Path(given["cwd"] or ".").resolve(strict=True)),
            env={os.fsdecode(name): os.fsdecode(value) for name, value in env.items()},
            new_session=bool(given["start_new_session"]),
            cores=sorted(os.sched_getaffinity(0)),
        )
        stdio = [own if end == -1 else end for own, end in enumerate(ends)]
        with NETWORK.open() as network:
            self.pid = zygote.fork(request, [*stdio, network.fileno()])
        self._child_created = True
        pipes = "p2cread p2cwrite c2pread c2pwrite errread errwrite".split()
        self._close_pipe_fds(*(given[name] for name in pipes))


def be_zygote(descriptor: int) -> NoReturn:
    """Import everything, fork what is asked for, and become each process that was forked."""
    imported_with = read_at_start(os.environ)
    subprocess.Popen = WarmPopen  # type: ignore[misc]  # before others take it from there
    compose_quickly()
    for module in MODULES:
        import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a zygote has {threads} threads, of which a fork keeps one"
    # For the name of a method in its log, torchrun has inspect look at every module, for a second.
    rendezvous = import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    rendezvous.get_method_name = lambda: sys._getframe(2).f_code.co_name
    gc.collect()
    gc.freeze()  # what is never collected is not copied either
    use_huge_pages()
    request, descriptors, channel, pid = serve(socket.socket(fileno=descriptor))
    WarmPopen.zygote = Zygote(channel, pid, imported_with)
    become(request, *descriptors)
    code = run(request.words)
    WarmPopen.zygote.end()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # at once: freeing every object takes seconds, since they are copies by then


def use_huge_pages() -> None:
    """Move this process's memory into huge pages, if the kernel can: a fork copies few entries.

    With them, to fork this process and to end the fork takes a third of the time.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        places, access, *_, inode = line.split()[:5]
        if "w" in access and inode == "0":
            first, end = (int(place, 16) for place in places.split("-"))
            first, end = -(-first // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
            if first < end:
                libc.madvise(first, end - first, MADV_COLLAPSE)


def serve(channel: socket.socket) -> tuple[Request, Sequence[int], socket.socket, int]:
    """Fork a process for every request; return, in that process, what it is to be.

    The last two items are the channel to the zygote of the new process and its id. In the zygote
    itself this ends with the process that it forks for.
    """
    while True:
        message, descriptors, *_ = socket.recv_fds(channel, LONGEST_REQUEST, 4)
        if not message:
            os._exit(0)
        # The child of a process that ends goes to its next ancestor that has asked for orphans: to
        # the process at the other end of the channel. It can wait for the child as for any other.
        middle = os.fork()
        if middle:
            os.waitpid(middle, 0)
            close(descriptors)
            continue
        middle = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == middle:
            pass
        pid = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        zygote = os.fork()
        if zygote:
            channel.send(str(pid).encode())
            close([channel.detach(), theirs.detach()])
            return Request(*json.loads(message)), descriptors, ours, zygote
        close([channel.detach(), ours.detach(), *descriptors])
        channel = theirs


def close(descriptors: Sequence[int]) -> None:
    """Close file descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def become(request: Request, stdin: int, stdout: int, stderr: int, network: int) -> None:
    """Give this process what a new one takes from its parent."""
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
    for name in request.env.keys() & MALLOC_OPTIONS.keys():
        value = min(int(request.env[name]), 2**31 - 1)
        ctypes.CDLL(None).mallopt(MALLOC_OPTIONS[name], value)
    import numpy
    import torch

    numpy.random.seed()  # noqa: NPY002  the state that numpy drew when it was imported
    if "OMP_NUM_THREADS" in request.env:
        torch.set_num_threads(int(request.env["OMP_NUM_THREADS"]))


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
    place = os.getcwd() if words[0] == "-m" else str(Path(words[0]).resolve().parent)
    more = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [*([] if os.environ.get("PYTHONSAFEPATH") else [place]), *more]
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.modules.pop(words[1], None)  # a new interpreter has not imported its program either
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
