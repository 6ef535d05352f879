"""The output of each rank but rank 0: a file of the run directory, which error messages name."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from rlhf.base.atomic import await_path
from rlhf.base.stored_files import open_regular_file
from rlhf.config.run_dir import refuse_links

FOLDER = "logs"


def describe_rank(rank: int, run_dir: Path | None) -> str:
    """Return the number of a rank on this host, the host, and the file with the rank's output."""
    file = f" ({run_dir / FOLDER}/rank_{rank}.txt)" if rank and run_dir is not None else ""
    return f"rank {rank} on {socket.gethostname()}{file}"


def redirect_output(run_dir: Path, rank: int) -> None:
    """Append all that this rank and its child processes print from now on to the rank's file."""
    await_path(run_dir)
    refuse_links(run_dir, [FOLDER])
    (folder := run_dir / FOLDER).mkdir(exist_ok=True)
    with open(folder / f"rank_{rank}.txt", "ab", opener=open_regular_file) as output:
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            os.dup2(output.fileno(), descriptor)
