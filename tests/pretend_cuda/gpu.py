"""A GPU without a GPU: the library of device.cpp, and a count of what a program asks of it.

Between ``start`` and ``stop`` tensors of cuda:0 hold real values, computed on the CPU, and a
program meets what it would meet on a GPU:

- tensors of two devices in one operation, and waiting or copying during a capture, are refused;
- autograd, autocast and decompositions are those of CUDA, and so are their dtypes;
- a captured graph computes nothing until it is replayed, into the memory of its capture;
- a graph whose memory was freed or moved since its capture is not replayed;
- fresh memory holds NaN, is counted, and ends at the size of the card;
- collectives refuse what NCCL refuses, and ranks that call different ones (nccl.py);
- environment variables that were read at the start cannot be set any more (environment.py).

What only a GPU shows: numerics of its kernels, races between streams, NCCL's own faults,
fragmentation, speed.
"""

import ctypes
import hashlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from types import FrameType
from typing import Any

from filelock import FileLock

from tests.pretend_cuda.environment import Environment

SOURCE = Path(__file__).with_name("device.cpp")
ROOT = Path(__file__).parents[2]
OURS = f"{ROOT / 'rlhf'}/"
BUILT = ROOT / ".pytest_cache"  # not RLHF_CACHE, which tests empty: compiling takes nine seconds
GIB = 2**30
CODE = (OURS, f"{ROOT / 'tests'}/")
HERE = f"{SOURCE.parent}/"
WRAPPERS = "/deepspeed/(comm|utils)/"  # they call collectives for the rest of DeepSpeed


class Event(Enum):
    """What the host asks of the GPU; the first six are those of device.cpp."""

    launch = 0
    sync = 1  # the host waits for a value or a shape
    to_device = 2  # a copy of pageable memory, which waits too
    to_device_pinned = 3
    to_host = 4
    to_host_pinned = 5
    replay = 6  # one launch of a whole graph
    capture = 7


@dataclass(frozen=True)
class Card:
    """A GPU as torch.cuda describes it."""

    name: str = "NVIDIA A100-SXM4-40GB"
    memory: int = int(39.4 * GIB)
    capability: tuple[int, int] = (8, 0)


@dataclass
class Counts:
    """How often each event happened: in all, by operation and by line of rlhf/."""

    events: Counter[Event] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    places: Counter[tuple[Event, str]] = field(default_factory=Counter)

    def lines(self, event: Event) -> dict[str, int]:
        """Return the lines of rlhf/ at which ``event`` happened, the most frequent first."""
        return {place: n for (kind, place), n in self.places.most_common() if kind is event}


@cache
def load() -> ctypes.CDLL:
    """Load the library, once; torch, which looks for CUDA once, must not be imported before."""
    assert "torch" not in sys.modules
    library = ctypes.CDLL(str(_built()))
    for name in ("used", "peak"):
        getattr(library, f"pretend_{name}").restype = ctypes.c_int64
    library.pretend_replay.restype = ctypes.c_char_p
    library.pretend_load()
    return library


def _torch_folder() -> Path:
    """Return the folder of torch, which is not imported."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def missing_to_pretend() -> str | None:
    """Return what keeps this machine from pretending a GPU; a build with CUDA has a real one's."""
    if "cuda: Optional[str] = None" not in (_torch_folder() / "version.py").read_text():
        return "torch is not a build for the CPU"
    return None if which("g++") else "no C++ compiler for the pretended GPU"


def _built() -> Path:
    """Return device.cpp as a shared library, which is compiled once for each version of torch."""
    torch = _torch_folder()
    made_of = SOURCE.read_bytes() + (torch / "version.py").read_bytes()
    library = BUILT / f"pretend_cuda-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    library.parent.mkdir(exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            include, made = torch / "include", library.with_suffix(".new")
            subprocess.run(
                [
                    *("g++", "-O1", "-shared", "-fPIC", "-std=c++20", str(SOURCE)),
                    *(f"-I{include}", f"-I{include}/torch/csrc/api/include"),
                    *(f"-L{torch}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}/lib"),
                    *("-o", str(made)),
                ],
                check=True,
            )
            made.replace(library)
    return library


class Gpu:
    """The pretended GPUs of this process, from ``start`` to ``stop``."""

    def __init__(self, library: ctypes.CDLL, card: Card | None = None, *, devices: int = 1) -> None:
        self.card = card or Card()
        self.devices = devices
        self.is_capturing = False
        self.pools: list[Any] = []  # of the graphs that were captured; None: its own
        self.environment = Environment()
        self._counts: list[Counts] = []
        self._captures: dict[int, str] = {}  # the line of each graph
        self._library = library
        self._listener = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p)(self._hear)

    def start(self) -> None:
        """Let torch find the GPUs; torch.cuda's own functions are replaced in torch_cuda.py."""
        self._library.pretend_start(self.devices, ctypes.c_int64(self.card.memory), self._listener)

    def stop(self) -> None:
        """Let torch find none again."""
        self._library.pretend_set_device(0)
        self._library.pretend_stop()

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Count what happens in the block."""
        counts = Counts()
        self._counts.append(counts)
        try:
            yield counts
        finally:
            self._counts.remove(counts)

    @contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Compute no values in the block: memory is counted, and the host's is not touched."""
        self._library.pretend_shapes_only(1)
        try:
            yield
        finally:
            self._library.pretend_shapes_only(0)

    @property
    def used(self) -> int:
        """Return the bytes of all tensors on the GPU."""
        return int(self._library.pretend_used())

    @property
    def peak(self) -> int:
        """Return the most bytes since ``reset_peak``."""
        return int(self._library.pretend_peak())

    def reset_peak(self) -> None:
        """Count the peak from now on."""
        self._library.pretend_reset_peak()

    def limit(self, num_bytes: int) -> None:
        """Let allocations beyond ``num_bytes`` fail, as if the card had no more."""
        self._library.pretend_limit(ctypes.c_int64(num_bytes))

    def note(self, event: Event, operation: str) -> None:
        """Count an event."""
        for counts in self._counts:
            counts.events[event] += 1
            counts.operations[operation] += 1
            counts.places[event, _place(sys._getframe(1))] += 1

    def _hear(self, kind: int, operation: bytes) -> None:
        self.environment.read("CUDA")
        if self._counts:
            self.note(Event(kind), operation.decode())

    def current_device(self) -> int:
        """Return the number of the device that this thread uses."""
        return int(self._library.pretend_current())

    def set_device(self, device: Any) -> None:
        """Let this thread use another device."""
        index = device if isinstance(device, int) else getattr(device, "index", None)
        if index is not None and index >= 0:
            self._library.pretend_set_device(index)

    def capture(self) -> int:
        """Record operations from now on instead of computing them; return the graph's number."""
        self.note(Event.capture, "graph")
        self.is_capturing = True
        number = int(self._library.pretend_capture())
        self._captures[number] = call_site()
        return number

    def end_capture(self) -> None:
        """Compute operations again."""
        self.is_capturing = False
        self._library.pretend_end_capture()

    def replay(self, graph: int) -> None:
        """Compute what was recorded."""
        self.note(Event.replay, "graph")
        if error := self._library.pretend_replay(graph):
            captured = f"the graph that was captured at {self._captures[graph]}"
            raise RuntimeError(f"CUDA error in {captured}: {error.decode()}")

    def forget(self, graph: int) -> None:
        """Free the memory of a graph's results."""
        self._library.pretend_forget(graph)


def _place(frame: FrameType | None) -> str:
    """Return the innermost line of rlhf/, as models/build.py:12."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OURS):
            return f"{name.removeprefix(OURS)}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside"


def call_site() -> str:
    """Return the innermost line of rlhf/ or of a test, and of a library if that is further in.

    A library calls from a thread of its own in a backward pass: then there is only its line.
    """
    frame: FrameType | None = sys._getframe(1)
    library = ""
    while frame is not None:
        name = frame.f_code.co_filename
        is_own = name.startswith(CODE) and not (name.startswith(HERE) and "/test_" not in name)
        if is_own or name.endswith("calling_rank.py"):
            own = f"{name.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
            return f"{own} ({library})" if library else own
        if not library and "/deepspeed/" in name and not re.search(WRAPPERS, name):
            library = f"{name.rpartition('site-packages/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return library or "outside"
