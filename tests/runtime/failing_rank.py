"""Started by torchrun in test_launcher.py: rank 1 breaks while rank 0 waits in a collective."""

import os
import sys
from pathlib import Path

import torch

from rlhf.runtime import launcher, worker
from rlhf.runtime.rendezvous import Rendezvous


def broken_run(run_dir: Path, meeting: Rendezvous, on_stuck: object) -> float:
    """In the place of worker.run."""
    torch.distributed.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        print("printed by rank 1")
        os.write(2, b"written by a library of rank 1\n")
        raise ValueError("this rank is broken")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # as DeepSpeed does while it tries compilers
    torch.distributed.barrier()
    sys.stdout.write("passed")
    return 0.0


worker.run_worker = broken_run  # type: ignore[assignment]
if os.environ["RANK"] == "0":
    launcher.run_rank(Path(sys.argv[1]), launcher.build_stderr_reporter())
else:
    launcher.join_started_ranks()
