"""Set up the process of launch.py, before it imports a library that reads the environment."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from rlhf.base.command import set_cuda_allocator, survive_output_errors
from rlhf.base.cpu import cap_onednn_isa, require_linux
from rlhf.base.safe_text import print_traceback
from rlhf.jobs.sweep_jobs import end_with_parent
from rlhf.runtime.rendezvous import drop_pod_variables

SPIN_COUNT = "GOMP_SPINCOUNT"
SHARED_PERCENT = 50.0
notices: list[str] = []  # for the log of the run that this process begins


def set_up_process() -> None:
    """Set this process's environment, traceback printing, and end together with its parent."""
    survive_output_errors()
    sys.excepthook = print_traceback
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra re-raises exceptions, so launch.py explains them
    os.environ["PYTHONSAFEPATH"] = "1"  # no child imports a json.py of the current directory
    set_spin_count()
    set_cuda_allocator()
    end_with_parent()
    if (advice := drop_pod_variables()) is not None:
        sys.stderr.write(f"{advice}\n")
    require_linux()
    cap_onednn_isa()


def set_spin_count(pressure: Path = Path("/proc/pressure/cpu")) -> None:
    """Set how long an idle thread of libgomp spins before it sleeps, unless the user has set it.

    By default libgomp spins for milliseconds, which slows down other programs. On cores that this
    run shares with other programs, a thread also spins until the scheduler resumes the threads for
    which it waits; a training step then takes four times the CPU time. ``pressure`` is the file in
    which Linux reports how long programs waited for a core.
    """
    if SPIN_COUNT in os.environ:
        return
    waited = _percent_waited(pressure)
    is_shared = waited >= SHARED_PERCENT
    os.environ[SPIN_COUNT] = "100" if is_shared else "10000"
    if is_shared:
        notices.append(
            f"other programs share the cores: programs waited for a core in {waited:.0f} % of the "
            f"last 10 s, so idle threads do not spin ({SPIN_COUNT}=100)"
        )


def _percent_waited(pressure: Path) -> float:
    """Return the share of the last 10 s in which a program waited for a core; 0 if not reported."""
    try:
        text = pressure.read_text()
    except OSError:  # containers and old kernels may not have the file
        return 0.0
    found = re.search(r"^some avg10=([\d.]+)", text)
    return float(found[1]) if found else 0.0
