"""End a run that hangs: print the stacks of every rank, name a rank that is stopped, and exit.

A collective waits for hours for a rank that is alive but does nothing. Therefore every rank watches
its own steps. A stopped process cannot report anything, but the other ranks on its host find it by
the process state that the kernel reports.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rlhf.base.heartbeat import Heartbeat

STACK_S = 1.0  # seconds in which a resumed rank can print its stacks


class Process(NamedTuple):
    """The host and the process id of a rank."""

    host: str
    pid: int

    @property
    def is_suspended(self) -> bool:
        """Return True if SIGSTOP or a debugger has stopped the process; False on another host."""
        if self.host != socket.gethostname():
            return False
        with suppress(OSError):
            # "pid (name) state ...": the name may contain ")", but no ")" follows the name.
            status = Path(f"/proc/{self.pid}/stat").read_text()
            return status.rpartition(")")[2].split()[0] in {"T", "t"}
        return False


def start_watchdog(
    heartbeat: Heartbeat,
    seconds: float,
    *,
    rank: int,
    others: Mapping[int, Process],
    on_stuck: Callable[[str], None],
) -> None:
    """Start a thread that calls ``on_stuck`` once, if ``heartbeat`` has no beat for ``seconds``.

    The thread first resumes suspended ``others`` on this host; its reason for the call names them.
    """
    # A stopped rank prints its stacks as soon as it resumes, whatever it is doing.
    faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)

    def wait_for_stall() -> None:
        interval, woken = min(1.0, seconds / 10), -math.inf
        while min(heartbeat.seconds_since_beat, time.monotonic() - woken) < seconds:
            slept_at = time.monotonic()
            time.sleep(interval)
            if time.monotonic() - slept_at > interval + seconds / 2:
                woken = time.monotonic()  # this process was itself stopped: other ranks report it
        sys.stderr.write(f"rank {rank} waits; its stacks:\n")
        faulthandler.dump_traceback(file=2, all_threads=True)
        stopped = {each: process for each, process in others.items() if process.is_suspended}
        for each, process in stopped.items():
            sys.stderr.write(f"rank {each} was stopped; its stacks:\n")
            sys.stderr.flush()
            with suppress(OSError):
                os.kill(process.pid, signal.SIGQUIT)  # handled when it resumes
                os.kill(process.pid, signal.SIGCONT)
        time.sleep(STACK_S)
        names = [f"rank {each} on {process.host}" for each, process in stopped.items()]
        advice = "see the stacks above" + " and in logs/ of the run directory" * bool(others)
        advice = f"{', '.join(names)} was stopped (SIGSTOP)" if names else advice
        on_stuck(
            f"no part of a step has ended for {seconds:g} seconds "
            f"(launcher.watchdog_minutes): {advice}"
        )

    threading.Thread(target=wait_for_stall, name="watchdog", daemon=True).start()
