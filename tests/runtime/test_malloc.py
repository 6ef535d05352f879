"""Freed memory stays in the process, so the next step does not fault it in again."""

import platform
import resource
import subprocess
import sys

import pytest

from rlhf.runtime import worker as malloc
from tests.runs import ROOT

FAULTS = """
import resource, torch
from rlhf.runtime.worker import keep_freed_memory

def page_faults():
    for _ in range(3):
        torch.ones(2**24).sum()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(2**24).sum()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain = page_faults()
assert keep_freed_memory()
print(plain, page_faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_kept_memory_is_not_faulted_in_again() -> None:
    """Five passes over a block of 64 MiB that is made and freed each time, before and after."""
    command = [sys.executable, "-c", FAULTS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    plain, kept = map(int, run.stdout.split())
    pages = 5 * 2**26 // resource.getpagesize()
    # Huge pages, where the kernel has them on, need far fewer faults: the ratio is what counts.
    assert kept < 0.1 * max(plain, pages // 100)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc.ctypes.util, "find_library", lambda name: None)
    assert malloc.keep_freed_memory() is False
