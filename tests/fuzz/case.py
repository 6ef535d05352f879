"""One hostile input, and what the program made of it."""

import ctypes
import io
import os
import select
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

from rlhf.base.errors import ConfigError, RlhfError

SECONDS = 20.0  # after which an input counts as a hang
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


class Case(NamedTuple):
    """A hostile input: its name, and ``act``, which does with it what a user would do.

    ``must_refuse`` is False if the damage may be harmless, such as a changed letter in a text.
    """

    name: str
    act: Callable[[], object]
    must_refuse: bool = True


Cases = Callable[[Random, Path], Iterator[Case]]


class Verdict(StrEnum):
    """What became of an input; the last three are faults of the program."""

    refused = "refused"
    harmless = "harmless"
    silent = "accepted in silence"
    traceback = "traceback"
    hang = "hang"


FAULTS = (Verdict.silent, Verdict.traceback, Verdict.hang)


def judged(case: Case, *, seconds: float = SECONDS) -> tuple[Verdict, str]:
    """Try ``case`` in a forked process; return the verdict and the message or traceback."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        try:
            os.write(write_end, _tried(case).encode(errors="replace")[:60_000])
        finally:
            os._exit(0)  # the parent's handlers and buffers are not this process's
    os.close(write_end)
    try:
        if not select.select([read_end], [], [], seconds)[0]:
            return Verdict.hang, f"no answer after {seconds:g} s"
        with open(read_end, "rb", closefd=False) as answer:
            verdict, _, text = answer.read().decode().partition("\n")
        return Verdict(verdict or Verdict.traceback), text
    finally:
        os.close(read_end)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)


def report_faults(found: Iterable[tuple[Case, Verdict, str]]) -> int:
    """Print faults and the number of each verdict; return 1 if there is a fault."""
    verdicts: Counter[str] = Counter()
    for case, verdict, text in found:
        verdicts[verdict] += 1
        if verdict in FAULTS:
            print(f"{verdict}: {case.name}\n{text}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    return int(any(verdicts[fault] for fault in FAULTS))


def _tried(case: Case) -> str:
    """Return the verdict and the text of an input that this process tries."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)  # threads do not survive a fork
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    try:
        case.act()
    except RlhfError as error:
        return f"{Verdict.refused}\n{error}"
    except BaseException:
        return f"{Verdict.traceback}\n{traceback.format_exc()}"
    return f"{Verdict.silent if case.must_refuse else Verdict.harmless}\n"


def refused_by(main: Callable[[], object]) -> None:
    """Run ``main`` of a command, in this process; raise what it printed if it refused its input."""
    sys.stderr = io.StringIO()
    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    said = sys.stderr.getvalue()
    assert "Traceback" not in said, said
    if code:
        assert code == 2, (code, said)
        assert len(said) < 3000, f"{len(said)} characters"
        assert not {"\x1b", "\x07"} & set(said)
        raise ConfigError(said)
