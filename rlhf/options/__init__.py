"""Options: parts of the core that a run can do without. Each option has one folder.

The core imports an option inside a function, behind an ``if`` on the option's key. Only ``keys``,
``rules`` and ``costs`` are imported for every configuration, so they import no torch.

The groups of the configuration are composed here, from the keys of the core, of the options and of
the installed methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.base.errors import ConfigError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.choices import AdvantageEstimator, Phase
from rlhf.config.schema.checkpoint import CheckpointKeys
from rlhf.config.schema.data import DataKeys
from rlhf.config.schema.keys import ANSWERING_PHASES, EVERY_PHASE, Affects, always_affects
from rlhf.config.schema.ppo import PpoKeys
from rlhf.config.schema.rollout import RolloutKeys
from rlhf.config.schema.supervised import RewardKeys
from rlhf.config.schema.zero import ZeroKeys
from rlhf.methods import add_keys_of_methods
from rlhf.options.ahead.keys import AheadKeys
from rlhf.options.average.keys import AverageKeys, AverageOffloadKeys
from rlhf.options.corrections.keys import CorrectionKeys
from rlhf.options.environments.keys import EnvironmentGroup, TurnKeys
from rlhf.options.fused_layers.keys import FusedLayers, FusedLayersGroup
from rlhf.options.hybrid_engine.keys import HybridEngineKeys
from rlhf.options.judges.keys import JudgeKeys
from rlhf.options.lora.keys import FrozenWeightKeys, LoraGroup
from rlhf.options.phase_store.keys import ReuseGroup
from rlhf.options.ptx.keys import PtxDataKeys, PtxKeys
from rlhf.options.replay.keys import DigestKeys
from rlhf.options.rollout_log.keys import RolloutLogKeys
from rlhf.options.scorers.keys import ScorerKeys
from rlhf.options.trunk.keys import TrunkKeys
from rlhf.options.vllm.keys import ServerKeys

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig


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


@add_keys_of_methods("ppo")
@dataclass(kw_only=True)
class PpoConfig(RolloutLogKeys, TurnKeys, PtxKeys, AverageKeys, CorrectionKeys, TrunkKeys, PpoKeys):
    """Settings of the PPO phase, which trains the policy against the reward model."""

    @property
    def has_separate_critic(self) -> bool:
        """Return True if a critic is trained, as GAE requires, that is not a part of the actor."""
        return self.advantage_estimator is AdvantageEstimator.gae and not self.shared_trunk


@add_keys_of_methods("reward")
@dataclass(kw_only=True)
class RewardConfig(RewardKeys):
    """Settings of the phase that trains the reward model."""


@add_keys_of_methods("rollout")
@dataclass(kw_only=True)
class RolloutConfig(ServerKeys, HybridEngineKeys, AheadKeys, RolloutKeys):
    """Settings for sampling responses."""

    backend: Backend
    """fast: this project's decode loop; hf: generate; hybrid_engine: DeepSpeed; vllm_server."""


@dataclass(kw_only=True)
class ZeroConfig(AverageOffloadKeys, FrozenWeightKeys, ZeroKeys):
    """Settings of the training engine, and of DeepSpeed's sharding and offloading of the models."""


@add_keys_of_methods("data")
@dataclass(kw_only=True)
class DataConfig(PtxDataKeys, DataKeys):
    """Settings for the sources of examples, and for the division of examples over phases."""


@add_keys_of_methods("checkpoint")
@dataclass(kw_only=True)
class CheckpointConfig(DigestKeys, CheckpointKeys):
    """Settings of checkpoints within a phase, from which a run resumes (docs/operations.md)."""


@dataclass(kw_only=True)
class OptionGroups(EnvironmentGroup, FusedLayersGroup, LoraGroup, ReuseGroup):
    """The top-level groups and keys of the configuration that belong wholly to an option."""


@dataclass(kw_only=True)
class RewardTermOptions(ScorerKeys, JudgeKeys):
    """Keys of a part of ``rewards`` that only the kinds of options read, such as judge."""


# Options that add metrics and panels, in the order of the tables.
OPTIONS_WITH_TABLES = ("environments", "corrections", "ptx", "hybrid_engine")


def read_option_tables(name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the content of the YAML file ``name`` of each option that has the file."""
    for option in OPTIONS_WITH_TABLES:
        path = Path(__file__).with_name(option) / name
        if path.is_file():
            yield read_yaml_beside(str(path), name)


class Exclusion(NamedTuple):
    """A pair of options that exclude each other."""

    holds: Callable[[RunConfig], bool]  # True if a run has both options
    affects: Affects = EVERY_PHASE  # a run without these phases may have both options


# By the key of the error in exclusions.yaml.
EXCLUSIONS: Mapping[str, Exclusion] = {
    "environment and hybrid_engine": Exclusion(
        lambda config: config.environment.is_used and config.rollout.backend == "hybrid_engine"
    ),
    "fused_layers and hybrid_engine": Exclusion(
        lambda config: (
            config.fused_layers is FusedLayers.liger and config.rollout.backend == "hybrid_engine"
        )
    ),
    "samplers and vllm_server": Exclusion(
        lambda config: (
            config.rollout.overlap
            and config.rollout.samplers > 1
            and config.rollout.backend == "vllm_server"
        ),
        ANSWERING_PHASES,
    ),
    "overlap and shared_trunk": Exclusion(
        lambda config: config.rollout.overlap and config.ppo.shared_trunk, ANSWERING_PHASES
    ),
    "hybrid_engine and shared_trunk": Exclusion(
        lambda config: config.rollout.backend == "hybrid_engine" and config.ppo.shared_trunk,
        ANSWERING_PHASES,
    ),
    "shared_trunk and lora": Exclusion(
        lambda config: config.ppo.shared_trunk and config.lora.rank > 0, always_affects(Phase.ppo)
    ),
}


def check_exclusions(config: RunConfig) -> None:
    """Raise ConfigError if the run uses two options that exclude each other."""
    for name, exclusion in EXCLUSIONS.items():
        if exclusion.affects(config) & set(config.phase.order) and exclusion.holds(config):
            errors: Mapping[str, str] = read_yaml_beside(__file__, "exclusions.yaml")
            raise ConfigError(errors[name].format_map(vars(config)))
