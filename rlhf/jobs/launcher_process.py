"""Set up the process of launch.py, before it imports a library that reads the environment."""

from __future__ import annotations

import os
import sys

from rlhf.base.cpu import cap_onednn_isa, require_linux
from rlhf.base.lasting_output import survive_output_errors
from rlhf.base.safe_text import print_traceback
from rlhf.jobs.sweep_jobs import end_with_parent
from rlhf.runtime.rendezvous import drop_pod_variables


def set_up_process() -> None:
    """Set this process's environment, traceback printing, and end together with its parent.

    Raises:
        CapabilityError: if the system is not Linux.
        ConfigError: if an environment variable that caps the instruction set names an unknown one.
    """
    survive_output_errors()
    sys.excepthook = print_traceback
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra re-raises exceptions, so launch.py explains them
    os.environ["PYTHONSAFEPATH"] = "1"  # no child imports a json.py of the current directory
    # Otherwise idle threads of libgomp spin for milliseconds, which slows down other programs.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    end_with_parent()
    if (advice := drop_pod_variables()) is not None:
        sys.stderr.write(f"{advice}\n")
    require_linux()
    cap_onednn_isa()
