"""The parent of a process with a user's code: no process that the code starts outlives the run.

It is started as ``python -P -m rlhf.base.supervisor MODULE:FUNCTION DESCRIPTOR PARENT`` and
forks the process that calls ``FUNCTION(DESCRIPTOR)``. A descendant that loses its parent becomes a
child of the supervisor, which therefore finds all descendants, in whatever session they are. It
ends them when the run ends, even if the run is killed, and when the forked process ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from <linux/prctl.h>
AWAITED_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}


def be_killed_after(parent: int) -> bool:
    """Let Linux kill this process when ``parent`` ends; return True if ``parent`` has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() != parent


def main() -> None:
    """Call the function in a forked process; once it or the run ends, kill all descendants."""
    target, descriptor, parent = sys.argv[1], *map(int, sys.argv[2:])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # sigwait never returns an ignored signal
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED_SIGNALS)
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return  # the run had ended before PR_SET_PDEATHSIG was set, so no signal would come
    forked_id = os.fork()
    if forked_id == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        module, _, name = target.partition(":")
        # Imported after the fork: the supervisor itself stays small.
        getattr(import_module(module), name)(descriptor)
        return
    os.close(descriptor)
    while signal.sigwait(AWAITED_SIGNALS) == signal.SIGCHLD:
        if forked_id in _reap_children():
            break
    _end_descendants()


def _reap_children() -> Iterator[int]:
    """Yield the ids of the children that have ended."""
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            yield pid


def _end_descendants() -> None:
    """Kill all children, and then the orphans that they leave, until there are none."""
    with suppress(ChildProcessError):
        while True:
            for child in _child_ids():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)


def _child_ids() -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended meanwhile
            _state, parent, *_ = stat.read_bytes().rpartition(b")")[2].split()
            if int(parent) == os.getpid():
                yield int(stat.parent.name)


if __name__ == "__main__":
    main()
