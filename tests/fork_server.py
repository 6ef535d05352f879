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
(see ``is_warm``). A test of start-up itself must use ``subprocess``. Processes with ``ON_GPU`` are
forked from a second zygote, which has loaded the pretended GPU before torch.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from tests.forked_process import NETWORK, Request, become, close, run
from tests.pretend_cuda.machine import NAME
from tests.quick_hydra import compose_once, compose_quickly

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
    "numpy.ctypeslib",
    "rich._emoji_codes",
    "rich.console",
    "rich.progress",
    "rich.table",
    "torch.distributed.run",
    "rlhf.jobs.launch_command",
    "rlhf.jobs.job",
    "rlhf.report.at_end",
    "rlhf.report.run_page",
    "rlhf.report.summary",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt_neox.modeling_gpt_neox",
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
# The environment of a process that runs on the pretended GPU, as DeepSpeed reads it when imported.
ON_GPU = {"PRETEND_CUDA": "1", "DS_ACCELERATOR": "cuda"}
# Variables that an interpreter or a library reads when it starts, unlike those of a run.
READ_AT_START = re.compile(
    r"(DS|GOMP|HF|JE|KMP|LD|MKL|ONEDNN|OPENBLAS|TRANSFORMERS|XDG)_|PRETEND_CUDA$|"
    r"PYTHON(?!(SAFE)?PATH|HASHSEED)|HOME$"
)
# A sampling process, the one program below the supervisor that imports as much as a run does.
SAMPLES = "-P -m rlhf.base.supervisor rlhf.options.ahead.overlapped_sampling:serve_samples".split()
PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>
MADV_COLLAPSE = 25  # from <linux/mman.h>, since Linux 6.1
HUGE_PAGE = 2**21  # bytes
LONGEST_REQUEST = 200_000  # bytes


def is_warm(
    command: Sequence[object], env: Mapping[str, str], imported_with: Container[str]
) -> bool:
    """Return whether forking gives the process that executing ``command`` would give.

    ``imported_with`` has what each zygote has read at its start.
    """
    python, *words = map(str, command)
    words = words[1:] if words[:1] == ["-u"] else words
    is_program = words[:1] == ["-m"] or (bool(words) and words[0].endswith(".py"))
    is_program |= words[:4] == SAMPLES
    is_program &= NAME not in env or "PRETEND_CUDA" in env  # or torch would find no GPU
    return python == sys.executable and is_program and read_at_start(env) in imported_with


def read_at_start(env: Mapping[str, str]) -> str:
    """Return the variables in ``env`` that must be the same in a zygote and in its children."""
    return str(sorted(pair for pair in (SETTINGS | env).items() if READ_AT_START.match(pair[0])))


class Zygote:
    """A process that forks others, seen from the process whose children they become."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self._channel = channel
        self._pid = pid
        self._lock = threading.Lock()
        # A forked process loses its parent on purpose, see serve(); then it becomes our child.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

    @classmethod
    def execute(cls, env: Mapping[str, str]) -> Zygote:
        """Start a zygote that imports everything itself, for processes with ``env``."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"from tests.fork_server import be_zygote; be_zygote({theirs.fileno()})"
        at_start = {name: value for name, value in env.items() if READ_AT_START.match(name)}
        own = SETTINGS | os.environ | at_start
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=ROOT,
                env=own | {"PYTHONPATH": f"{ROOT}:{own.get('PYTHONPATH', '')}"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for pytest, which ends the zygote
            )
        process.returncode = 0  # it ends with this process: Popen need not warn that it runs
        return cls(ours, process.pid)

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
        with suppress(ChildProcessError):  # in a fork of its parent, or killed by a supervisor
            os.waitpid(self._pid, 0)


class WarmPopen(subprocess.Popen):
    """``subprocess.Popen`` that forks Python programs from a zygote wherever it can."""

    zygotes: ClassVar[dict[str, Zygote | None]] = {}  # by what they read; None: not yet needed

    def _execute_child(self, *args: Any) -> None:
        # The one part of Popen that makes the process; its arguments differ between Pythons.
        given = inspect.signature(super()._execute_child).bind(*args).arguments
        command, env = given["args"], dict(given["env"] or os.environ)
        zygotes = WarmPopen.zygotes
        if not zygotes:
            zygotes |= {read_at_start(os.environ | more): None for more in ({}, ON_GPU)}
        plain = not (given["shell"] or given["preexec_fn"])
        if isinstance(command, str | bytes | os.PathLike) or not (
            plain and is_warm(command, env, zygotes)
        ):
            super()._execute_child(*args)
            return
        if (zygote := zygotes[read_at_start(env)]) is None:
            zygote = zygotes[read_at_start(env)] = Zygote.execute(env)
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        request = Request(
            words=[os.fspath(word) for word in command[1:]],
            cwd=str(Path(given["cwd"] or ".").resolve(strict=True)),
            env={os.fsdecode(name): os.fsdecode(value) for name, value in env.items()},
            new_session=bool(given["start_new_session"]),
            cores=sorted(os.sched_getaffinity(0)),
            passed=list(given["pass_fds"]),
        )
        stdio = [own if end == -1 else end for own, end in enumerate(ends)]
        with NETWORK.open() as network:
            self.pid = zygote.fork(request, [*stdio, network.fileno(), *request.passed])
        self._child_created = True
        pipes = "p2cread p2cwrite c2pread c2pwrite errread errwrite".split()
        self._close_pipe_fds(*(given[name] for name in pipes))


def be_zygote(descriptor: int) -> NoReturn:
    """Import everything, fork what is asked for, and become each process that was forked."""
    gc.disable()  # until all is imported, which collections would slow down by a fifth
    imported_with = read_at_start(os.environ)
    subprocess.Popen = WarmPopen  # type: ignore[misc]  # before others take it from there
    compose_quickly()
    if "PRETEND_CUDA" in os.environ:
        import_module("tests.pretend_cuda.gpu").load()
    # In a fresh clone, two zygotes that import all in the same order compile all of it twice.
    is_odd = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579"
    for module in reversed(MODULES) if is_odd else MODULES:
        import_module(module)
    re._MAXCACHE = 4096  # type: ignore[attr-defined]  # a run uses more patterns than the 512 kept
    # Every model that is loaded or saved reads this table, which is built with the first.
    import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    import_module("rlhf.base.versions").code_version()  # kept: a run hashes 400 files
    compose_once()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a zygote has {threads} threads, of which a fork keeps one"
    # For the name of a method in its log, torchrun has inspect look at every module, for a second.
    rendezvous = import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    rendezvous.get_method_name = lambda: sys._getframe(2).f_code.co_name
    # When each process ends, torch would take its operators apart, for a tenth of a second.
    unregister = import_module("torch.library")._del_library
    for finalizer, made in weakref.finalize._registry.items():  # type: ignore[attr-defined]
        if made.func is unregister:
            finalizer.atexit = False
    gc.collect()
    gc.freeze()  # what is never collected is not copied either
    gc.enable()
    use_huge_pages()
    request, descriptors, channel, pid = serve(socket.socket(fileno=descriptor))
    zygote = WarmPopen.zygotes[imported_with] = Zygote(channel, pid)
    become(request, *descriptors)
    code = run(request.words)
    zygote.end()
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
        message, descriptors, *_ = socket.recv_fds(channel, LONGEST_REQUEST, 5)
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
