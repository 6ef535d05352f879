"""What every test relies on: a CPU, no network, its own cache, and a way to compose configs."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from ctypes import CDLL
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hydra import compose as hydra_compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, settings
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError

from rlhf.config.hydra_parts import composing
from rlhf.config.machine_rates import cpu_rates, store_rates
from tests.fork_server import ON_GPU
from tests.needs_lab import REASON, lacks_lab
from tests.pretend_cuda.gpu import Gpu, load, missing_to_pretend
from tests.quick_hydra import compose_quickly

CONF = Path(__file__).parents[1] / "conf"
GPU_LIBRARY = pytest.StashKey[CDLL]()

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
# Every second worker imports these first: in a fresh clone, two workers that import all in the same
# order compile all of it twice.
WITHOUT_TORCH = "sympy networkx pandas optuna tensorboard.compat hypothesis"

# Here and not in a fixture: DeepSpeed and huggingface_hub read these when they are imported.
# With a spin count launch.py does not look at how busy the machine is, and prints nothing of it.
os.environ.update(DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1", GOMP_SPINCOUNT="10000")
os.environ.pop("WANDB_MODE", None)

# A full collection takes a second with the libraries loaded, and compositions cause many of them.
gc.set_threshold(100_000, 50, 100)


def pytest_configure(config: pytest.Config) -> None:
    """Load the pretended GPU where tests run: before a test module imports torch."""
    if not config.getoption("numprocesses", None) and missing_to_pretend() is None:
        config.stash[GPU_LIBRARY] = load()
    if WORKER % 2:
        for name in WITHOUT_TORCH.split():
            import_module(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal the tests to the workers: each begins with whole runs, and ends with quick tests.

    A worker gets a part of the list, and later the end of the part of a worker that has more left.
    The first gets all runs on a pretended GPU, so that one worker has a zygote for them.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    on_gpu = {i.path for i in items if getattr(getattr(i, "module", None), "ON_GPU", 0) is ON_GPU}
    by_folder = sorted(slow | on_gpu, key=lambda path: (path.parent.name != "runtime", path))
    first = [path for path in by_folder if path not in on_gpu]
    quick = [item for item in items if item.path not in slow | on_gpu]
    modules = {path: [item for item in items if item.path == path] for path in by_folder}
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    dealt: list[pytest.Item] = []
    for worker in range(workers):
        end = len(dealt) + (len(items) - len(dealt)) // (workers - worker)
        own = [path for path in by_folder if path in on_gpu] if worker == 0 else []
        for path in [*own, *first[worker::workers]]:
            dealt += modules[path]
        room = max(0, end - len(dealt))
        dealt += quick[:room]
        del quick[:room]
    items[:] = [*dealt, *quick]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    """Skip a test of the core that is refused a key or an option of the lab, which is missing."""
    report = yield
    if report.failed and call.excinfo is not None and lacks_lab(str(call.excinfo.getrepr())):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {REASON}")
    return report


def pytest_collection_finish() -> None:
    """Leave all that is imported out of the collections that DeepSpeed asks for again and again."""
    gc.collect()
    gc.freeze()


# Hypothesis calls the generation of inputs slow where the machine is busy with something else.
settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# A shell's background job, as CI may be, and all that it starts ignore Ctrl-C, which tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

compose_quickly()

# One core for each pytest worker and all that it starts, so that torch uses one thread: models of a
# test are so small that a second thread mostly waits, and a run takes less than half the CPU time.
# The process that starts the workers keeps all cores, since they inherit what it has.
if "PYTEST_XDIST_WORKER" in os.environ:
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[WORKER % len(_cores)]})


@pytest.fixture(scope="session", autouse=True)
def _cache_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tokenised data away from the user's own cache; no run needs to measure the CPU.

    The workers share a cache, as runs of a user do: each would compile the kernels for itself.
    """
    folder = tmp_path_factory.getbasetemp()
    cache = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache"
    cache.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_CACHE", str(cache))
        store_rates(replace(cpu_rates(), is_measured=True))
        yield


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Undo what a test does to this process: later tests and their processes would inherit it.

    Such processes could not be forked from the zygote, and DS_ACCELERATOR decides what they run on.
    """
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_flush_denormal(False)  # as set_torch_threads sets it


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A small tokenizer, which tests only read."""
    from tests.models_on_disk import small_tokenizer

    return small_tokenizer()


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of TINY_RUN with its plan, which all workers share: tests only read it."""
    from tests.runs import finished, session_folder

    folder = session_folder(tmp_path_factory)
    run_dir = folder / "tiny_run"
    with FileLock(folder / "tiny_run.lock"):
        return run_dir if (run_dir / "result.json").exists() else finished(run_dir, "plan=check")


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A pretended GPU, for this test only: an A100, or the Card of an indirect parameter."""
    library = request.config.stash.get(GPU_LIBRARY, None)
    if library is None:
        pytest.skip(str(missing_to_pretend()))
    from rlhf.kernels import kernel_checks
    from tests.pretend_cuda.torch_cuda import replace

    monkeypatch.setattr(kernel_checks, "_STATE", kernel_checks._State())  # as in a new process
    gpu = Gpu(library, getattr(request, "param", None))
    gpu.start()
    replace(gpu, monkeypatch.setattr)
    yield gpu
    gpu.stop()


Compose = Callable[[list[str]], DictConfig]


Composed = dict[tuple[str, ...], tuple[DictConfig, DictConfig]]


@pytest.fixture(scope="session")
def _composed() -> Composed:
    """Group choices -> Hydra's own config and ours; conf/ does not change while tests run."""
    return {}


@pytest.fixture
def compose(_composed: Composed) -> Iterator[Compose]:
    """Compose ``conf/`` with command-line overrides, as launch.py does; interpolations resolved.

    Hydra loads and merges some 40 files for every choice of groups, and then applies the other
    overrides. The same choice of groups is loaded once.
    """

    def composed(overrides: list[str]) -> DictConfig:
        parsed = OverridesParser.create().parse_overrides(overrides)
        choices = [each for each in parsed if (CONF / each.key_or_group).is_dir()]
        groups = tuple(str(each.input_line) for each in choices)
        if groups not in _composed:
            _composed[groups] = _split(hydra_compose("config", groups, return_hydra_config=True))
        own, ours = _composed[groups]
        HydraConfig.instance().set_config(own)  # for ${hydra:...} in our own keys
        config = deepcopy(ours)
        values = [each for each in parsed if each not in choices]
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        with suppress(InterpolationResolutionError):  # a mistake that the test is about
            OmegaConf.resolve(config)  # now: the next composition replaces what ${hydra:...} reads
        return config

    GlobalHydra.instance().clear()
    with composing(CONF):
        yield composed
    HydraConfig.instance().cfg = None


def _split(config: DictConfig) -> tuple[DictConfig, DictConfig]:
    """Return a config of the hydra node alone, and ``config`` without it."""
    own = OmegaConf.masked_copy(config, "hydra")
    with open_dict(config):
        del config["hydra"]
    return own, config
