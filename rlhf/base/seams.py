"""Interfaces of the seams: the functions and values of an option's module that the core uses.

A seam has the name of its module. ``modules_of(NAME)`` of rlhf/options/__init__.py yields the
modules NAME of the options, and ``hooks_of(NAME, HOOK)`` the values of those that have HOOK: they
have only what their option needs. A caller annotates them with the class below that describes NAME.
Importing this file imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from datasets import Dataset
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlhf.base.types import (
        TokenEngine,
        TokenModel,
    )
    from rlhf.config.choices import Phase, RewardKind
    from rlhf.config.roles import Role
    from rlhf.config.schema.keys import Unread
    from rlhf.config.schema.model import ModelConfig
    from rlhf.config.schema.rewards import RewardTerm
    from rlhf.config.schema.run import RunConfig
    from rlhf.data.collate import PairStep
    from rlhf.models.language_model import Scorer
    from rlhf.models.model_uses import ModelUse
    from rlhf.models.sources import ModelSource
    from rlhf.phases.ppo.hooks import PpoHook
    from rlhf.phases.reward import RewardTrainer
    from rlhf.phases.shared.context import RunContext
    from rlhf.report.charts import RunFiles
    from rlhf.report.run_charts import ChartSection
    from rlhf.rewards.rules import ScoreFunction

# A function that extends a built model; the tuple has the name of a new head, if it has one.
Extension = Callable[["PreTrainedModel", tuple[str, ...]], None]


class MeasureNames(NamedTuple):
    """Names of the metrics that an option adds; its module ``keys`` has them as ``MEASURES``."""

    evaluated: Sequence[str] = ()
    """Held-out metrics, or groups of them, that only runs with the option log."""
    members: Mapping[str, Sequence[str]] = {}
    """By group of metrics: the names that NAME stands for in the group's row of the table."""
    answers: Sequence[str] = ()
    """Measures of answers in result.json."""
    times: Sequence[str] = ()
    """Times at which answers are measured, in addition to before and after."""


class Shown(NamedTuple):
    """The texts of a prompt and of its response for samples.jsonl."""

    prompt: str
    response: str
    messages: list[dict[str, str]] | None = None
    """The messages of a response that is a conversation."""


class RewardsSeam(Protocol):
    """``rewards``: scores responses in a process of its own. Used by biases, judges and
    step_rewards."""

    KIND: RewardKind
    """The kind of the parts of ``rewards`` that the option scores."""

    def build(self, part: RewardTerm, run_dir: Path) -> tuple[ScoreFunction, list[str]]:
        """Return the function that scores responses, and the names of its criteria.

        Raises ConfigError, whose message begins with the key, if the part cannot be used.
        """


class ReportSeam(Protocol):
    """``report``: adds charts to the report of a run. Used by branches and rollout_log."""

    def chart_sections(self, run: RunFiles) -> Sequence[ChartSection]:
        """Return sections of charts, and of answers for its samples, to add to the report."""


class Saving(NamedTuple):
    """A changed configuration with which a run needs less memory."""

    words: str
    """The change as overrides."""
    config: RunConfig
    is_exact: bool
    """True if the changed run computes the same weights."""


class CostsSeam(Protocol):
    """``costs``: the bytes, FLOPs and seconds that an option adds to a plan.

    Used by the planner and ``rlhf/models/model_uses.py``.
    """

    def adapt_model_sources(
        self, config: RunConfig, phase: Phase, sources: dict[Role, tuple[str, ModelConfig]]
    ) -> dict[Role, tuple[str, ModelConfig]]:
        """Return ``sources``, each role's config key and model, as the option changes them."""

    def adapt_model(self, config: RunConfig, phase: Phase, model: ModelUse) -> ModelUse:
        """Return ``model`` as the option changes it in ``phase``: its trained weights or copies."""

    def added_step_seconds(
        self, config: RunConfig, phase: Phase, tokens: float, seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the seconds per step of ``phase`` of the option's activities, by name.

        ``tokens`` is the expected length of a response; ``seconds`` has the core's activities.
        """


class HooksSeam(Protocol):
    """``hooks``: takes part in the steps of PPO.

    Used by ahead, average, biases, branches, clip_cov, corrections, distillation, environments,
    gdpo, moving_reference, ptx, resampling and rollout_log.
    """

    HOOK: type[PpoHook]
    """The class of the hook; PpoHook describes the methods."""


class ModelsSeam(Protocol):
    """``models``: changes how models are checked and trained.

    Used by distillation, ensembles and lora.
    """

    def find_reference(
        self, config: RunConfig, phase: Phase, actor: TokenEngine
    ) -> TokenModel | ModelSource | None:
        """Return the reference of ``phase``, or where to load it; None: a copy of the policy."""

    def build_reward_trainer(
        self, context: RunContext, steps: list[PairStep], pairs: Dataset
    ) -> RewardTrainer:
        """Return the reward model's trainer, which takes ``steps`` and then the option's steps."""

    def check_tokenizer(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise an error if a model of the option has other tokens than the run's ``tokenizer``."""


class KeysSeam(Protocol):
    """``keys``: the option's configuration keys, in dataclasses.

    The config groups of a run inherit from these classes. Used by every option with keys.
    """

    UNREAD: ClassVar[Mapping[str, Unread]]
    """Keys of the core that have no effect with this option, with the reason; optional."""
    COLUMN: ClassVar[str]
    """The key that names a column of the data, which PPO reads; optional."""
    REWARDS: ClassVar[Mapping[RewardKind, Sequence[str]]]
    """Keys that a kind of reward reads; * after a required key."""
    LOG: ClassVar[str]
    """Name of a file in the run directory to which rank 0 appends; optional."""
    MEASURES: ClassVar[MeasureNames]
    """Names of what the option measures; optional."""


class RulesSeam(Protocol):
    """``rules``: refuses values of the option's keys, and computes sizes from them.

    Used by every option whose keys need, exclude or change keys of the core.
    """

    def check(self, config: RunConfig) -> None:
        """Raise ConfigError if a rule is broken; called after the core's rules."""

    def check_batches(self, config: RunConfig) -> None:
        """Raise ConfigError if a rule is broken; called after the core has divided batches.

        Used by branches and ptx.
        """

    def check_models(self, config: RunConfig, phases: Container[Phase]) -> None:
        """Raise an error if a model of ``phases`` lacks layers that the option's keys require."""

    def complete_reward_model(
        self, scorer: Scorer, source: ModelSource, keys: Mapping[str, Any]
    ) -> nn.Module:
        """Return the reward model of a finished run with these ``keys``, built on ``scorer``."""

    def reward_warnings(self, config: RunConfig) -> Iterator[str]:
        """Yield a warning for each doubtful part of ``rewards``; printed before any training."""

    def num_added_steps(self, config: RunConfig, phase: Phase, *, examples: int) -> int:
        """Return the number of optimizer steps to add to the steps over ``examples`` examples."""
