"""The table of all options: methods that a run can do without. Each option has one folder.

A module in the folder of an option plugs into the seam of the core that has the module's name
(``rlhf/base/seams.py`` has the interfaces of the seams). An option has modules only for the seams
that it needs. The core calls ``modules_of(SEAM)`` instead of naming an option. ``keys`` and
``rules`` are imported for every configuration, so they import no torch.

The groups of the configuration are composed here, from the keys of the core and of the options.
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
from rlhf.config.choices import Phase, RewardKind
from rlhf.config.schema.checkpoint import CheckpointKeys
from rlhf.config.schema.data import DataKeys
from rlhf.config.schema.keys import ANSWERING_PHASES, EVERY_PHASE, Affects, always_affects
from rlhf.config.schema.ppo import PpoKeys
from rlhf.config.schema.rollout import RolloutKeys
from rlhf.config.schema.supervised import RewardKeys
from rlhf.config.schema.zero import ZeroKeys
from rlhf.options.ahead.keys import AheadKeys
from rlhf.options.average.keys import AverageKeys, AverageOffloadKeys
from rlhf.options.biases.keys import BiasKeys
from rlhf.options.branches.keys import BranchKeys
from rlhf.options.clip_cov.keys import ClipCovKeys
from rlhf.options.corrections.keys import CorrectionKeys
from rlhf.options.distillation.keys import DistillationKeys
from rlhf.options.ensembles.keys import EnsembleKeys
from rlhf.options.environments.keys import EnvironmentGroup, TurnKeys
from rlhf.options.fused_layers.keys import FusedLayers, FusedLayersGroup
from rlhf.options.gdpo.keys import GdpoKeys
from rlhf.options.hybrid_engine.keys import HybridEngineKeys
from rlhf.options.judges.keys import JudgeKeys
from rlhf.options.lora.keys import FrozenWeightKeys, LoraGroup
from rlhf.options.moving_reference.keys import MovingReferenceKeys
from rlhf.options.phase_store.keys import ReuseGroup
from rlhf.options.ptx.keys import PtxDataKeys, PtxKeys
from rlhf.options.replay.keys import DigestKeys
from rlhf.options.resampling.keys import ResamplingKeys
from rlhf.options.rollout_log.keys import RolloutLogKeys
from rlhf.options.trunk.keys import TrunkKeys
from rlhf.options.vllm.keys import ServerKeys

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig


class Option(NamedTuple):
    """A row of the table: the folder of an option, and the condition under which a run uses it."""

    name: str
    is_on: Callable[[RunConfig], bool]


@cache
def _import_option_module(option: str, seam: str) -> ModuleType | None:
    """Return the option's module for ``seam``; None if the option has no module for it."""
    name = f"{__name__}.{option}.{seam}"
    return import_module(name) if find_spec(name) else None


OPTIONS = (
    Option("environments", lambda config: config.environment.is_used),
    Option("ahead", lambda config: config.rollout.lag > 0),
    Option("resampling", lambda config: config.ppo.resampling_rounds > 0),
    Option("gdpo", lambda config: config.ppo.gdpo),
    Option("distillation", lambda config: config.ppo.teacher_setting != ""),
    Option("clip_cov", lambda config: config.ppo.clip_cov_ratio > 0),
    Option(
        "corrections",
        lambda config: (
            config.ppo.rollout_correction != "none" or config.ppo.off_policy_mask_kl is not None
        ),
    ),
    Option(
        "branches",
        lambda config: config.ppo.value_targets != "gae" or config.ppo.critic_check.every > 0,
    ),
    Option("ptx", lambda config: config.ppo.ptx_coef > 0 or config.data.ptx_path is not None),
    Option("average", lambda config: config.ppo.ema_beta > 0),
    Option("moving_reference", lambda config: config.ppo.reference_every > 0),
    Option("rollout_log", lambda config: config.ppo.log_rollouts_every > 0),
    Option("trunk", lambda config: config.ppo.shared_trunk),
    Option("fused_layers", lambda config: config.fused_layers is not FusedLayers.none),
    Option("lora", lambda config: config.lora.rank > 0),
    Option("ensembles", lambda config: config.reward.members > 1),
    Option(
        "judges",
        lambda config: any(part.kind is RewardKind.judge for part in config.rewards.values()),
    ),
    Option(
        "biases",
        lambda config: any(part.kind is RewardKind.bias for part in config.rewards.values()),
    ),
    Option(
        "step_rewards",
        lambda config: any(part.kind is RewardKind.steps for part in config.rewards.values()),
    ),
    Option("hybrid_engine", lambda config: config.rollout.backend == "hybrid_engine"),
    Option("vllm", lambda config: config.rollout.backend == "vllm_server"),
    Option("phase_store", lambda config: config.reuse.phases != "never"),
    Option("replay", lambda config: config.checkpoint.digest_every > 0),
)


def modules_of(seam: str, config: RunConfig | None = None) -> Iterator[Any]:
    """Yield the modules for ``seam`` of the options that ``config`` switches on.

    Without ``config``, yield the modules of all options.
    """
    for option in OPTIONS:
        if config is None or option.is_on(config):
            module = _import_option_module(option.name, seam)
            if module is not None:
                yield module


class Backend(StrEnum):
    """The program that samples responses: the project's own, transformers, DeepSpeed or vLLM."""

    fast = "fast"
    hf = "hf"
    hybrid_engine = "hybrid_engine"
    vllm_server = "vllm_server"

    @property
    def measures_logprobs(self) -> bool:
        """Return True if the backend returns the log-probability of every token that it samples."""
        return self in (Backend.fast, Backend.vllm_server)


@dataclass(kw_only=True)
class PpoConfig(
    DistillationKeys,
    RolloutLogKeys,
    ResamplingKeys,
    GdpoKeys,
    BranchKeys,
    TurnKeys,
    PtxKeys,
    AverageKeys,
    MovingReferenceKeys,
    ClipCovKeys,
    CorrectionKeys,
    TrunkKeys,
    PpoKeys,
):
    """Settings of the PPO phase, which trains the policy against the reward model."""


@dataclass(kw_only=True)
class RewardConfig(EnsembleKeys, RewardKeys):
    """Settings of the phase that trains the reward model."""


@dataclass(kw_only=True)
class RolloutConfig(ServerKeys, HybridEngineKeys, AheadKeys, RolloutKeys):
    """Settings for sampling responses."""

    backend: Backend
    """fast: this project's decode loop; hf: generate; hybrid_engine: DeepSpeed; vllm_server."""


@dataclass(kw_only=True)
class ZeroConfig(AverageOffloadKeys, FrozenWeightKeys, ZeroKeys):
    """Settings of the training engine, and of DeepSpeed's sharding and offloading of the models."""


@dataclass(kw_only=True)
class DataConfig(PtxDataKeys, DataKeys):
    """Settings for the sources of examples, and for the division of examples over phases."""


@dataclass(kw_only=True)
class CheckpointConfig(DigestKeys, CheckpointKeys):
    """Settings of checkpoints within a phase, from which a run resumes (docs/operations.md)."""


@dataclass(kw_only=True)
class OptionGroups(EnvironmentGroup, FusedLayersGroup, LoraGroup, ReuseGroup):
    """The groups and keys of the configuration that belong to one option each."""


@dataclass(kw_only=True)
class RewardTermOptions(BiasKeys, JudgeKeys):
    """Keys of a part of ``rewards`` whose kind is an option's."""


def hooks_of(seam: str, hook: str, config: RunConfig | None = None) -> Iterator[Any]:
    """Yield the attribute ``hook`` of the options' modules for ``seam``, where it exists."""
    for module in modules_of(seam, config):
        if hasattr(module, hook):
            yield getattr(module, hook)


def yaml_of_options(name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the content of each option's YAML file ``name``, if the option has the file."""
    for option in OPTIONS:
        path = Path(__file__).with_name(option.name) / name
        if path.is_file():
            yield read_yaml_beside(str(path), name)


class Exclusion(NamedTuple):
    """A pair of options that exclude each other, and the error message for a run with both."""

    holds: Callable[[RunConfig], bool]
    message: str  # {KEY} stands for the value of KEY
    affects: Affects = EVERY_PHASE  # a run without these phases may have both options


EXCLUSIONS = (
    Exclusion(
        lambda config: config.environment.is_used and config.rollout.backend == "hybrid_engine",
        "environment.kind={environment.kind} with rollout.backend=hybrid_engine: the Hybrid "
        "Engine cannot add an observation to its KV cache; use rollout=fast",
    ),
    Exclusion(
        lambda config: (
            config.fused_layers is not FusedLayers.none
            and config.rollout.backend == "hybrid_engine"
        ),
        "fused_layers={fused_layers} with rollout.backend=hybrid_engine: DeepSpeed replaces the "
        "same layers; use only one of the two",
    ),
    Exclusion(
        lambda config: config.environment.is_used and config.ppo.resampling_rounds > 0,
        "environment.kind={environment.kind} with ppo.resampling_rounds={ppo.resampling_rounds}: "
        "resampling does not replace episodes; set ppo.resampling_rounds=0",
    ),
    Exclusion(
        lambda config: config.environment.is_used and config.ppo.branch_setting != "",
        "{ppo.branch_setting} with environment.kind={environment.kind}: an environment cannot be "
        "set back to the middle of an episode; use environment=none",
        always_affects(Phase.ppo),
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
        lambda config: config.ppo.resampling_rounds > 0 and config.rollout.lag > 0,
        "ppo.resampling_rounds={ppo.resampling_rounds} with rollout.lag={rollout.lag}: prompts are "
        "replaced after their responses are scored, but a lag samples the next steps earlier; use "
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
        lambda config: config.ppo.teacher_setting != "" and config.ppo.shared_trunk,
        "{ppo.teacher_setting} with ppo.shared_trunk=true: the reference is part of the shared "
        "trunk, so it cannot be a teacher; set ppo.shared_trunk=false, or remove the teacher",
        always_affects(Phase.ppo),
    ),
    Exclusion(
        lambda config: config.ppo.reference_every > 0 and config.ppo.teacher_path is not None,
        "ppo.reference_every={ppo.reference_every} with ppo.teacher_path={ppo.teacher_path}: the "
        "reference is the teacher, which must not become the policy; use ppo.reference_every=0",
        always_affects(Phase.ppo),
    ),
    Exclusion(
        lambda config: config.ppo.reference_every > 0 and config.ppo.shared_trunk,
        "ppo.reference_every={ppo.reference_every} with ppo.shared_trunk=true: the reference is a "
        "frozen branch of the trunk; use ppo.reference_every=0, or ppo.shared_trunk=false",
        always_affects(Phase.ppo),
    ),
    Exclusion(
        lambda config: (
            config.ppo.reference_every > 0 and config.lora.rank > 0 and "actor" in config.lora.roles
        ),
        "ppo.reference_every={ppo.reference_every} with adapters on the actor: the reference has "
        "none that could follow; use ppo.reference_every=0, or remove actor from lora.roles",
        always_affects(Phase.ppo),
    ),
    Exclusion(
        lambda config: config.ppo.reference_every > 0 and config.rollout.backend == "hybrid_engine",
        "ppo.reference_every={ppo.reference_every} with rollout.backend=hybrid_engine: DeepSpeed "
        "moves the actor's weights into kernels; use rollout=fast, or ppo.reference_every=0",
        always_affects(Phase.ppo),
    ),
    Exclusion(
        lambda config: config.ppo.shared_trunk and config.lora.rank > 0,
        "ppo.shared_trunk=true with adapters: the reference is a copy of frozen top layers, and "
        "adapters below would change the reference; use lora=none, or ppo.shared_trunk=false (with "
        "LoRA the reference is the actor itself)",
        always_affects(Phase.ppo),
    ),
    Exclusion(
        lambda config: config.ppo.branch_setting != "" and config.rollout.lag > 0,
        "{ppo.branch_setting} with rollout.lag={rollout.lag}: the responses belong to the policy "
        "of an earlier step; use rollout.lag=0",
        always_affects(Phase.ppo),
    ),
)


def check_exclusions(config: RunConfig) -> None:
    """Raise ConfigError if the run uses two options that exclude each other."""
    for each in EXCLUSIONS:
        if each.affects(config) & set(config.phase.order) and each.holds(config):
            raise ConfigError(each.message.format_map(vars(config)))
