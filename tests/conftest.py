"""What every test relies on: a CPU, no network, its own cache, and a way to compose configs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError

from rlhf.planning.cpu_rates import cpu_rates, keep_rates

CONF = Path(__file__).parents[1] / "conf"

# Here and not in a fixture: DeepSpeed and huggingface_hub read these when they are imported.
os.environ.update(DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1")
os.environ.pop("WANDB_MODE", None)

# The same language read by libyaml: OmegaConf parses 40 files for every composition.
yaml.SafeLoader = yaml.CSafeLoader

# One core for each pytest worker and all that it starts, so that torch uses one thread: models of a
# test are so small that a second thread mostly waits, and a run takes less than half the CPU time.
# The process that starts the workers keeps all cores, since they inherit what it has.
if "PYTEST_XDIST_WORKER" in os.environ:
    _cores = sorted(os.sched_getaffinity(0))
    _worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.sched_setaffinity(0, {_cores[_worker % len(_cores)]})


@pytest.fixture(scope="session", autouse=True)
def _cache_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tokenised data away from the user's own cache; no run needs to measure the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_CACHE", str(tmp_path_factory.mktemp("cache")))
        keep_rates(replace(cpu_rates(), is_measured=True))
        yield


Compose = Callable[[list[str]], DictConfig]


@pytest.fixture(scope="session")
def _composed() -> dict[tuple[str, ...], DictConfig]:
    """What was composed before: the files in conf/ do not change while tests run."""
    return {}


@pytest.fixture
def compose(_composed: dict[tuple[str, ...], DictConfig]) -> Iterator[Compose]:
    """Compose ``conf/`` with command-line overrides, as launch.py does; interpolations resolved."""

    def composed(overrides: list[str]) -> DictConfig:
        key = (os.environ.get("RLHF_CACHE", ""), *overrides)
        if key not in _composed:
            _composed[key] = _compose(overrides)
        return deepcopy(_composed[key])

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield composed
    HydraConfig.instance().cfg = None


def _compose(overrides: list[str]) -> DictConfig:
    config = hydra_compose("config", overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(config)  # for ${hydra:...} in our own keys
    with open_dict(config):
        del config["hydra"]
    with suppress(InterpolationResolutionError):  # a mistake that the test is about
        OmegaConf.resolve(config)  # now: the next composition replaces what ${hydra:...} reads
    return config
