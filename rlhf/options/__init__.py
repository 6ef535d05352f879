"""Methods that a run can do without: one folder each, and this table of all of them.

A folder has, as far as its option needs them, these modules; each plugs into one seam of the core
(``rlhf/base/seams.py`` has their interfaces). The core names no option: it asks this table for the
modules of a seam. ``keys`` and ``rules`` are imported for every configuration, and import no torch;
the other modules only if the configuration switches their option on.

The groups of the configuration are composed here, of the core's keys and those of the options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.base.errors import ConfigError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.choices import Phase
from rlhf.config.schema.checkpoint import CheckpointKeys
from rlhf.config.schema.data import DataKeys
from rlhf.config.schema.keys import ANSWERING_PHASES, EVERY_PHASE, Affects, results_of
from rlhf.config.schema.ppo import PpoKeys
from rlhf.config.schema.rollout import RolloutKeys
from rlhf.config.schema.supervised import RewardKeys
from rlhf.config.schema.zero import ZeroKeys
from rlhf.options.ahead.keys import AheadKeys
from rlhf.options.average.keys import AverageKeys, AverageOffloadKeys
from rlhf.options.branches.keys import BranchKeys
from rlhf.options.corrections.keys import CorrectionKeys
from rlhf.options.distillation.keys import DistillationKeys
from rlhf.options.ensembles.keys import EnsembleKeys
from rlhf.options.environments.keys import EnvironmentGroup, TurnKeys
from rlhf.options.hybrid_engine.keys import HybridEngineKeys
from rlhf.options.lora.keys import FrozenWeightKeys, LoraGroup
from rlhf.options.phase_store.keys import ReuseGroup
from rlhf.options.ptx.keys import PtxDataKeys, PtxKeys
from rlhf.options.replay.keys import DigestKeys
from rlhf.options.resampling.keys import ResamplingKeys
from rlhf.options.sequence_parallel.keys import SequenceParallelKeys
from rlhf.options.trunk.keys import TrunkKeys
from rlhf.options.vllm.keys import ServerKeys

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig


class Option(NamedTuple):
    """An option: its folder, and the keys that switch it on."""

    name: str
    is_on: Callable[[RunConfig], bool]

    def module(self, seam: str) -> ModuleType | None:
        """Return the option's module for ``seam``; None if it does not plug into this seam."""
        return _import_module_of(self.name, seam)


@cache
def _import_module_of(option: str, seam: str) -> ModuleType | None:
    name = f"{__name__}.{option}.{seam}"
    return import_module(name) if find_spec(name) else None


OPTIONS = (
    Option("environments", lambda config: config.environment.is_used),
    Option("ahead", lambda config: config.rollout.lag > 0),
    Option("resampling", lambda config: config.ppo.resampling_rounds > 0),
    Option("corrections", lambda config: config.ppo.rollout_correction != "none"),
    Option(
        "branches",
        lambda config: config.ppo.value_targets != "gae" or config.ppo.critic_check.every > 0,
    ),
    Option("ptx", lambda config: config.ppo.ptx_coef > 0 or config.data.ptx_path is not None),
    Option("average", lambda config: config.ppo.ema_beta > 0),
    Option("distillation", lambda config: config.ppo.teacher_path is not None),
    Option("trunk", lambda config: config.ppo.shared_trunk),
    Option("lora", lambda config: config.lora.rank > 0),
    Option("ensembles", lambda config: config.reward.members > 1),
    Option("sequence_parallel", lambda config: config.zero.sequence_parallel_size > 1),
    Option("hybrid_engine", lambda config: config.rollout.backend == "hybrid_engine"),
    Option("vllm", lambda config: config.rollout.backend == "vllm_server"),
    Option("phase_store", lambda config: config.reuse.phases != "never"),
    Option("replay", lambda config: config.checkpoint.digest_every > 0),
    Option("cpu_kernels", lambda config: config.hardware.device == "cpu"),
    Option("gpu_kernels", lambda config: config.hardware.device == "cuda"),
)


def kernels_for(device: str) -> Any:
    """Return the module ``kernels`` for this type of device: of the GPU's option, or the CPU's."""
    return _import_module_of("gpu_kernels" if device == "cuda" else "cpu_kernels", "kernels")


def modules_of(seam: str, config: RunConfig | None = None) -> Iterator[Any]:
    """Yield the modules for ``seam`` of the options that ``config`` switches on; None: of all."""
    for option in OPTIONS:
        if config is None or option.is_on(config):
            module = option.module(seam)
            if module is not None:
                yield module


class Backend(StrEnum):
    """Programs that sample responses: ours, generate, DeepSpeed's Hybrid Engine, a vLLM server."""

    fast = "fast"
    hf = "hf"
    hybrid_engine = "hybrid_engine"
    vllm_server = "vllm_server"

    @property
    def measures_logprobs(self) -> bool:
        """Return True if the backend returns the log-probabilities of what it samples."""
        return self in (Backend.fast, Backend.vllm_server)


@dataclass(kw_only=True)
class PpoConfig(
    DistillationKeys,
    ResamplingKeys,
    BranchKeys,
    TurnKeys,
    PtxKeys,
    AverageKeys,
    CorrectionKeys,
    TrunkKeys,
    PpoKeys,
):
    """Proximal policy optimisation against the reward model."""


@dataclass(kw_only=True)
class RewardConfig(EnsembleKeys, RewardKeys):
    """Reward model training."""


@dataclass(kw_only=True)
class RolloutConfig(ServerKeys, HybridEngineKeys, AheadKeys, RolloutKeys):
    """Settings for sampling responses."""

    backend: Backend
    """fast: this project's decode loop; hf: generate; hybrid_engine: DeepSpeed; vllm_server."""


@dataclass(kw_only=True)
class ZeroConfig(SequenceParallelKeys, AverageOffloadKeys, FrozenWeightKeys, ZeroKeys):
    """Training engine, and DeepSpeed's sharding and offloading of the models."""


@dataclass(kw_only=True)
class DataConfig(PtxDataKeys, DataKeys):
    """Sources of examples, and their division over phases."""


@dataclass(kw_only=True)
class CheckpointConfig(DigestKeys, CheckpointKeys):
    """Checkpoints inside a phase, from which resume continues (docs/operations.md)."""


@dataclass(kw_only=True)
class OptionGroups(EnvironmentGroup, LoraGroup, ReuseGroup):
    """The groups of a run that belong to one option each."""


def hooks_of(seam: str, hook: str, config: RunConfig | None = None) -> Iterator[Callable[..., Any]]:
    """Yield the functions named ``hook`` in the modules for ``seam``; a module may have none."""
    for module in modules_of(seam, config):
        if hasattr(module, hook):
            yield getattr(module, hook)


def tables_of(name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the content of the YAML file ``name`` of each option that has one."""
    for option in OPTIONS:
        path = Path(__file__).with_name(option.name) / name
        if path.is_file():
            yield read_yaml_beside(str(path), name)


class Exclusion(NamedTuple):
    """Options that exclude one another: the test, and the refusal with values of its keys."""

    holds: Callable[[RunConfig], bool]
    message: str
    affects: Affects = EVERY_PHASE


EXCLUSIONS = (
    Exclusion(
        lambda config: config.environment.is_used and config.rollout.backend == "hybrid_engine",
        "environment.kind={environment.kind} with rollout.backend=hybrid_engine: its KV cache "
        "cannot be extended by an observation; use rollout=fast",
    ),
    Exclusion(
        lambda config: config.environment.is_used and config.ppo.resampling_rounds > 0,
        "environment.kind={environment.kind} with ppo.resampling_rounds={ppo.resampling_rounds}: "
        "episodes are not replaced; use 0",
    ),
    Exclusion(
        lambda config: config.environment.is_used and config.ppo.branching_key != "",
        "{ppo.branching_key} with environment.kind={environment.kind}: an environment cannot be "
        "set back to the middle of an episode; use environment=none",
        results_of(Phase.ppo),
    ),
    Exclusion(
        lambda config: (
            config.reward.members > 1 and config.lora.rank > 0 and "reward" in config.lora.roles
        ),
        "reward.members={reward.members} with adapters on the reward model: each member trains its "
        "own top layers, and the layers below are frozen; remove reward from lora.roles, or set "
        "reward.members=1",
    ),
    Exclusion(
        lambda config: config.reward.members > 1 and config.zero.sequence_parallel_size > 1,
        "reward.members={reward.members} with zero.sequence_parallel_size="
        "{zero.sequence_parallel_size}: members are not divided over sequences; set "
        "reward.members=1",
    ),
    Exclusion(
        lambda config: config.ppo.resampling_rounds > 0 and config.rollout.lag > 0,
        "ppo.resampling_rounds={ppo.resampling_rounds} with rollout.lag={rollout.lag}: prompts are "
        "replaced when their responses are scored, and a lag samples these steps before; use "
        "rollout.lag=0, or ppo.resampling_rounds=0",
        ANSWERING_PHASES,
    ),
    Exclusion(
        lambda config: (
            config.rollout.overlap
            and config.rollout.samplers > 1
            and config.rollout.backend == "vllm_server"
        ),
        "rollout.overlap=true with rollout.samplers={rollout.samplers} and rollout.backend="
        "vllm_server: the server has the weights of one rollout at a time, so one process sends "
        "them; use rollout.samplers=1",
        ANSWERING_PHASES,
    ),
    Exclusion(
        lambda config: config.rollout.overlap and config.ppo.shared_trunk,
        "rollout.overlap=true with ppo.shared_trunk=true: the policy is a branch of the trunk; use "
        "ppo.shared_trunk=false",
        ANSWERING_PHASES,
    ),
    Exclusion(
        lambda config: config.rollout.backend == "hybrid_engine" and config.ppo.shared_trunk,
        "rollout.backend=hybrid_engine with ppo.shared_trunk=true: the Hybrid Engine replaces the "
        "actor's layers, and the critic and the reference use the layers of the shared trunk too; "
        "use rollout=fast, or ppo.shared_trunk=false",
        ANSWERING_PHASES,
    ),
    Exclusion(
        lambda config: config.ppo.teacher_path is not None and config.ppo.shared_trunk,
        "ppo.teacher_path={ppo.teacher_path}: the reference of a shared trunk is a part of it; set "
        "ppo.shared_trunk=false, or remove ppo.teacher_path",
        results_of(Phase.ppo),
    ),
    Exclusion(
        lambda config: config.ppo.shared_trunk and config.lora.rank > 0,
        "ppo.shared_trunk=true with adapters: the reference is a copy of frozen top layers, and "
        "adapters below would change the reference; use lora=none, or ppo.shared_trunk=false (with "
        "LoRA the reference is the actor itself)",
        results_of(Phase.ppo),
    ),
    Exclusion(
        lambda config: config.ppo.branching_key != "" and config.rollout.lag > 0,
        "{ppo.branching_key} with rollout.lag={rollout.lag}: the responses belong to the policy of "
        "an earlier step; use rollout.lag=0",
        results_of(Phase.ppo),
    ),
)


def refuse_exclusions(config: RunConfig) -> None:
    """Raise ConfigError if the run uses two options that exclude one another."""
    for each in EXCLUSIONS:
        if each.affects(config) & set(config.phase.order) and each.holds(config):
            raise ConfigError(each.message.format_map(vars(config)))
