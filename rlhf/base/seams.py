"""Interfaces of the seams: what a module of an option offers to the core, by the module's name.

``modules_of(NAME)`` of rlhf/options/__init__.py yields the modules NAME of the options. A caller
annotates them with the class below that describes NAME. Importing this file imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from rlhf.base.decoder_modules import DecoderModules
    from rlhf.base.ranks import Ranks
    from rlhf.base.types import (
        Engine,
        Responses,
        Rollout,
        RolloutBackend,
        StatefulWithTensors,
        TokenEngine,
        TokenModel,
    )
    from rlhf.chat.talker import Talker
    from rlhf.config.batches import BatchPlan
    from rlhf.config.choices import Dtype, Phase
    from rlhf.config.roles import Role
    from rlhf.config.schema.keys import Unread
    from rlhf.config.schema.model import ModelConfig
    from rlhf.config.schema.run import RunConfig
    from rlhf.data.records import Record
    from rlhf.data.splits import PhaseData
    from rlhf.engine.settings import OptimizerSettings
    from rlhf.engine.split_adamw import AdamwUpdate
    from rlhf.models.language_model import LanguageModel, Scorer
    from rlhf.models.model_uses import ModelUse
    from rlhf.models.sources import ModelSource
    from rlhf.phases.ppo.hooks import PpoHook
    from rlhf.phases.ppo.models import PpoModels
    from rlhf.phases.ppo.rlhf_engine import RLHFEngine
    from rlhf.phases.shared.backends import BackendParts
    from rlhf.phases.shared.context import RunContext
    from rlhf.phases.shared.exporting import Export
    from rlhf.plan.phase_memory import PhaseMemory
    from rlhf.plan.phase_plan import PhasePlan
    from rlhf.plan.time_model import CostModel, Pass
    from rlhf.report.charts import RunFiles
    from rlhf.report.run_charts import ChartSection
    from rlhf.rollout.decoders.decoder import Decoder, DrawingDecoder
    from rlhf.rollout.decoders.layers import AdapterOf
    from rlhf.rollout.sampling import SamplingSettings

# Extends a built model, in which the modules of these names are new and must be trained.
Extension = Callable[["PreTrainedModel", tuple[str, ...]], None]


class SourcesSeam(Protocol):
    """``sources``: makes the records of a run, instead of reading them from data sets.

    Used by environments.
    """

    def load_parts(self, config: RunConfig) -> dict[Phase, PhaseData]:
        """Return the records of the run's phases, divided by data.split."""


class BackendsSeam(Protocol):
    """``backends``: samples responses instead of the core's backends.

    Used by hybrid_engine and vllm.
    """

    IS_SERVER: bool
    """A server samples, with the weights of one rollout at a time; no GPU of the run does."""

    def check(self, config: RunConfig, model: PreTrainedConfig | None) -> None:
        """Raise an error if the backend cannot sample here, or not from this ``model``."""

    def build(self, config: RunConfig, parts: BackendParts) -> RolloutBackend:
        """Return the backend."""


class StepsSeam(Protocol):
    """``steps``: looks at the trained models after a step.

    Used by replay.
    """

    def after_step(
        self,
        context: RunContext,
        phase: Phase,
        step: int,
        engines: Mapping[str, StatefulWithTensors],
        *,
        is_last: bool,
    ) -> None:
        """Read the engines after ``step``, before its checkpoint; every rank calls it."""


class PhasesSeam(Protocol):
    """``phases``: runs a phase, or takes its result from somewhere else.

    Used by phase_store.
    """

    def train_once(
        self,
        context: RunContext,
        phase: Phase,
        train: Callable[[], dict[str, Any]],
        reuse: Callable[[Path], None],
    ) -> None:
        """Call ``train``, which returns the result, or ``reuse`` with the folder of a like run."""


class AverageKernel(Protocol):
    """A kernel that updates moving averages of split weights."""

    def update_averages(
        self, averages: Sequence[Tensor], halves: Sequence[tuple[Tensor, Tensor]], new: float
    ) -> None:
        """Update the fp32 ``averages`` in place: average += new * (weight - average)."""


class LogprobsKernel(Protocol):
    """A kernel that computes log-probs from logits (N, V), and the gradient of the logits."""

    def reduce_rows(
        self, logits_NV: Tensor, ids_N: Tensor, *, scale: float, outs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Write the log-sum-exp, the entropy and the logit of the token id to ``outs``."""

    def replace_by_gradient_(
        self,
        logits_NV: Tensor,
        ids_N: Tensor,
        *,
        scale: float,
        log_sums_N: Tensor,
        slopes_N: Tensor,
    ) -> None:
        """Overwrite the logits with their gradient, d sum(slopes * log-probs) / d logits."""


class DrawKernel(Protocol):
    """A kernel that samples tokens."""

    def draw(
        self,
        logits_NV: Tensor,
        draws_N: Tensor,
        *,
        scale: float,
        barred_N: Tensor | None,
        end_id: int,
    ) -> tuple[Tensor, Tensor]:
        """Sample tokens (N,) by inverse CDF; return them and their fp32 log-probs (N,)."""


class KernelsSeam(Protocol):
    """``kernels``: computes on a type of device what torch would compute more slowly.

    ``kernels_for`` of the table returns the module for a device; the other functions return None
    where it has no kernel. Used by cpu_kernels and gpu_kernels.
    """

    def describe(self, dtype: Dtype) -> str | None:
        """Return one line on the kernels that a run in ``dtype`` uses, if there is one."""

    def adamw(self, sizes: Sequence[int], device: torch.device) -> AdamwUpdate | None:
        """Return AdamW's update of split parameters of these ``sizes``."""

    def averages(self, sizes: Sequence[int], device: torch.device) -> AverageKernel | None:
        """Return the update of moving averages of split parameters."""

    def logprobs(self, logits: Tensor) -> LogprobsKernel | None:
        """Return the kernel for log-probs of ``logits``, by their dtype."""

    def draws(self, logits: Tensor) -> DrawKernel | None:
        """Return the kernel that samples from ``logits``."""

    def decoder(
        self,
        parts: DecoderModules,
        adapter_of: AdapterOf,
        *,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
    ) -> DrawingDecoder | Decoder | None:
        """Return a decoder for a model of a known family."""

    def attention(
        self, device: torch.device, dtype: torch.dtype, *, group: int, size: int
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None:
        """Return attention of a new token per row: queries, keys, values, KV cache, positions."""


class MeasureNames(NamedTuple):
    """Names of what an option measures; its module ``keys`` has them as ``MEASURES``."""

    evaluated: Sequence[str] = ()
    """Held-out metrics, or groups of them, that only runs with the option log."""
    members: Mapping[str, Sequence[str]] = {}
    """The names that NAME stands for in the table of metrics, by group."""
    answers: Sequence[str] = ()
    """Measures of answers in result.json."""
    times: Sequence[str] = ()
    """Times at which answers are measured, beside before and after."""


class Shown(NamedTuple):
    """Prompt and response as a reader sees them."""

    prompt: str
    response: str
    messages: list[dict[str, str]] | None = None
    """The messages of a response that has several."""


class Partner(Protocol):
    """The other side of a conversation, which answers responses while they are sampled."""

    def wrap(
        self, backend: RolloutBackend, tokenizer: PreTrainedTokenizerBase, ranks: Ranks
    ) -> RolloutBackend:
        """Return a backend whose responses are conversations with the partner."""

    def yardsticks(self, records: Sequence[Record]) -> dict[str, float]:
        """Return numbers for result.json that results with these ``records`` compare with."""

    def close(self) -> None:
        """End the processes of the partner."""


class ResponsesSeam(Protocol):
    """``responses``: answers what the policy writes, and measures and shows such responses.

    Used by environments.
    """

    SUCCESS: str
    """The measure that is 1 if a response is right."""

    def open_partner(self, config: RunConfig) -> Partner:
        """Return a partner, whose processes run until it is closed."""

    def score(self, responses: Responses) -> Tensor:
        """Return the scores (B,) that the responses come with: rewards.NAME.kind=environment."""

    def measure(self, responses: Responses) -> dict[str, Tensor]:
        """Return measures (B,) of the responses, named GROUP/NAME."""

    def results(self, by_prompt: Mapping[str, list[float]], when: str) -> dict[str, Any]:
        """Return the entries of result.json for the values of the measures of each prompt."""

    def show(self, rollout: Rollout, texts: Sequence[str]) -> list[Shown]:
        """Return how a reader sees each row, whose response decodes to ``texts[row]``."""


class Policy(NamedTuple):
    """A policy that a run may have in its directory.

    A module ``keys`` names those of its option, which are made from trained ones, as ``POLICIES``.
    """

    name: str
    """What results and evaluations call it."""
    model: str
    """What samples and chats call it."""
    folder: str
    """Its place in the run directory."""
    label: str
    """What people read."""
    suffix: str = ""
    """The end of the names of its measures in result.json, such as score_after_SUFFIX."""


class ReportParts:
    """``report``: what an option adds to the summary and the report of a run.

    The module has an object of a subclass as ``REPORT``. Used by ``rlhf/report/``.
    """

    changes: ClassVar[Mapping[str, str]] = {}
    """Measures of result.json with values before and after training, by label."""
    yardsticks: ClassVar[Mapping[str, str]] = {}
    """Numbers of result.json with which the score compares, by label."""

    def sections(self, run: RunFiles) -> Sequence[ChartSection]:
        """Return further charts of the run."""
        return ()


class ChatSeam(Protocol):
    """``chat``: what a model does by itself, in the place of a chat. Used by environments."""

    FLAG: str
    """The flag of ``rlhf.chat`` that starts it, with its meaning in ``HELP``."""
    HELP: str
    PROMPT_MARK: str
    """A regular expression of what precedes the prompts of samples.jsonl."""

    def suits(self, keys: Mapping[str, object]) -> bool:
        """Return True if a run with these keys was trained for it."""

    def play(
        self,
        run_dir: Path,
        talker: Talker,
        sampling: SamplingSettings,
        *,
        seed: int,
        write: Callable[[str], None],
    ) -> None:
        """Write what the model ``talker`` of a run does."""


class JobParts:
    """``jobs``: what an option adds to how a run is prepared, before its ranks start.

    The module has an object of a subclass as ``JOBS``. Used by ``rlhf/jobs/`` for all
    options, and by the checks of every rank.
    """

    def complete(self, config: RunConfig, *, in_sweep: bool) -> RunConfig:
        """Return the configuration of a run with values that depend on how it is started."""
        return config

    def trial_words(self, words: Sequence[str]) -> list[str]:
        """Return further overrides for a trial of a search, which has the overrides ``words``."""
        return []

    def check_data(
        self, config: RunConfig, phases: Collection[Phase], is_quick: Callable[[str, str], bool]
    ) -> None:
        """Raise a DataError if other data than examples is unusable.

        ``is_quick`` returns True if the file with the value of a key is here and small.
        """

    def has_slow_examples(self, config: RunConfig) -> bool:
        """Return True if examples take so long to make that the planner should make only a few."""
        return False


class Generation(NamedTuple):
    """How a rollout generates responses, as far as its costs depend on it."""

    gathers: bool | None = None
    """Whether sharded weights are gathered once per rollout; None: rollout.gather_weights."""
    tensor_parallel: int = 1
    """Number of ranks that share one copy of the weights."""
    caches_per_row: int = 1
    """Sequences whose KV cache is kept for each row that is decoded."""
    ends_early: bool = False
    """True if few responses use all tokens that they may have."""


class Saving(NamedTuple):
    """A change of a configuration that needs less memory."""

    words: str
    """The change as overrides."""
    config: RunConfig
    is_exact: bool
    """True if the changed run computes the same weights."""


class Costs:
    """``costs``: the bytes, FLOPs and seconds that an option adds to a plan.

    The module has an object of a subclass as ``COSTS``, which has the methods that its option
    needs; the methods here add nothing. Used by the planner and ``rlhf/models/model_uses.py``.
    """

    def model_sources(
        self, config: RunConfig, phase: Phase, sources: dict[Role, tuple[str, ModelConfig]]
    ) -> dict[Role, tuple[str, ModelConfig]]:
        """Return the config key and value of each model of ``phase``, trained models first."""
        return sources

    def adapt_model(self, config: RunConfig, phase: Phase, model: ModelUse) -> ModelUse:
        """Return what ``phase`` holds of ``model``, such as its number of trained weights."""
        return model

    def adapt_generation(self, config: RunConfig, generation: Generation) -> Generation:
        """Return how the policy generates responses."""
        return generation

    def ranks_per_sequence(self, config: RunConfig) -> int:
        """Return the number of ranks that divide each training sequence."""
        return 1

    def activation_bytes(self, model: ModelUse, *, sequences: int, tokens: int, size: int) -> int:
        """Return bytes that a training pass stores in addition, on all ``ranks_per_sequence``."""
        return 0

    def pass_seconds(self, costs: CostModel, model: ModelUse, work: Pass) -> float:
        """Return seconds that forward passes over ``work`` take in addition."""
        return 0.0

    def training_passes(self, config: RunConfig) -> int:
        """Return the number of further micro-batches of an optimizer step of PPO."""
        return 0

    def step_seconds(
        self, config: RunConfig, tokens: float, seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return seconds per PPO step of further activities, by name.

        ``tokens`` is the expected length of a response; ``seconds`` has the usual activities.
        """
        return {}

    def evaluations(self, config: RunConfig) -> int:
        """Return how often more the held-out prompts are answered."""
        return 0

    def evaluation_seconds(self, scene: PhaseMemory, micro: int) -> float:
        """Return the seconds of other evaluations of PPO, in micro-batches of size ``micro``."""
        return 0.0

    def rearrange_ppo(
        self,
        scene: PhaseMemory,
        plan: PhasePlan,
        plan_ppo: Callable[[PhaseMemory], PhasePlan],
        plan_rollout: Callable[[PhaseMemory, int, int], PhasePlan],
    ) -> PhasePlan:
        """Return the plan of PPO with the choices of ``plan``, if other processes take part in it.

        ``plan_ppo`` plans another scene with the same choices; ``plan_rollout`` plans a number of
        responses, of which a number is decoded at once.
        """
        return plan

    def offloads(self) -> dict[str, str]:
        """Return the fields of ``zero`` that offload what the option holds, and its name."""
        return {}

    def savings(self, config: RunConfig) -> Iterator[Saving]:
        """Yield changes of the option's keys with which the run needs less memory."""
        yield from ()

    def idle_keys(self, config: RunConfig) -> Iterator[str]:
        """Yield a sentence for each key that has no effect with the option."""
        yield from ()

    def doubts(self, config: RunConfig, phases: Collection[Phase]) -> Iterator[str]:
        """Yield sentences on why ``phases`` may cost more than their user expects."""
        yield from ()


class HooksSeam(Protocol):
    """``hooks``: takes part in the steps of PPO.

    Used by ahead, average, branches, corrections, environments, ptx and resampling.
    """

    HOOK: type[PpoHook]
    """The class of the hook; PpoHook has its methods."""


class ModelsSeam(Protocol):
    """``models``: changes how models are built, optimized, checked and saved.

    ``hooks_of`` yields single functions: a module has those that its option needs. Used by average,
    distillation, ensembles, hybrid_engine, lora, sequence_parallel and trunk.
    """

    def extend_model(
        self,
        config: RunConfig,
        role: Role,
        seed: int,
        model: PreTrainedModel,
        head: tuple[str, ...],
    ) -> None:
        """Add parts to a built ``model``; its new modules named in ``head`` must be trained."""

    def change_optimizer(
        self, settings: OptimizerSettings, config: RunConfig, phase: Phase, role: Role
    ) -> OptimizerSettings:
        """Return changed settings of the optimizer that trains the model ``role`` in ``phase``."""

    def find_reference(
        self, config: RunConfig, phase: Phase, actor: TokenEngine
    ) -> TokenModel | ModelSource | None:
        """Return the reference of ``phase``, or its source; None for a copy of the policy."""

    def find_export(
        self, config: RunConfig, engine: Engine, source: ModelSource | None
    ) -> Export | None:
        """Return how to save the engine's model; None to save its own tensors.

        ``source`` is the model that it was trained from; None to save a whole ordinary model.
        """

    def complete_reward_model(
        self, scorer: Scorer, source: ModelSource, keys: Mapping[str, Any]
    ) -> nn.Module:
        """Return the reward model of a finished run with these ``keys``, around its ``scorer``."""

    def build_sft_module(
        self, config: RunConfig, model: PreTrainedModel, ranks: Ranks
    ) -> LanguageModel:
        """Return the module that SFT trains, around a built ``model``."""

    def start_sft(
        self, config: RunConfig, model: PreTrainedModel, ranks: Ranks, plan: BatchPlan
    ) -> None:
        """Change the ``model`` that SFT trains after its engine has started."""

    def actor_sections(self, config: RunConfig) -> Mapping[str, Any]:
        """Return sections of DeepSpeed's config of PPO's actor, which then needs DeepSpeed."""

    def adapt_policy(self, policy: LanguageModel) -> None:
        """Change PPO's policy before its engine is built."""

    def adapt_actor(self, module: nn.Module) -> Mapping[str, float]:
        """Change the module of PPO's actor; return metrics that are logged with every step."""

    def build_models(self, engine: RLHFEngine) -> PpoModels:
        """Build the models of PPO in a layout of the option's own."""

    def build_critic_export(self, actor: Engine, tokenizer: PreTrainedTokenizerBase) -> Export:
        """Return how to save the critic of that layout as a model of its own."""

    def check_tokenizer(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise an error if another model of the option does not suit the run's ``tokenizer``."""

    def check_models(self, config: RunConfig, phases: Container[Phase]) -> None:
        """Raise an error if a model of ``phases``, built without weights, does not suit."""


class KeysSeam(Protocol):
    """``keys``: the option's part of the configuration, which the table of options composes.

    Its dataclasses are the bases of a group. Used by every option with keys.
    """

    UNREAD: ClassVar[Mapping[str, Unread]]
    """Keys of others that have no effect with this option; a module may leave it out."""


class RulesSeam(Protocol):
    """``rules``: refuses values of the option's keys. A module has at least one of these.

    Used by every option whose keys need, or exclude, keys of the core.
    """

    def check(self, config: RunConfig) -> None:
        """Raise ConfigError if a rule is broken; called after the core's rules."""

    def check_first(self, config: RunConfig) -> None:
        """Raise ConfigError as ``check``, but before the core's rules. Used by environments."""

    def check_batches(self, config: RunConfig) -> None:
        """Raise ConfigError as ``check``, but once the core's batches can be divided.

        Used by branches and ptx.
        """


class LengthsSeam(Protocol):
    """``lengths``: replaces the lengths of single responses. Used by environments."""

    def tokens_after_prompt(self, config: RunConfig) -> tuple[str, int]:
        """Return key and value of the most tokens after a prompt."""
        ...

    def max_policy_tokens(self, config: RunConfig) -> int:
        """Return the most tokens that the policy can write after a prompt."""
        ...


class SharingSeam(Protocol):
    """``sharing``: lets ranks share the rows of a batch. Used by sequence_parallel."""

    KEY: ClassVar[str]
    """Key of the number of ranks."""

    def ranks_per_row(self, config: RunConfig) -> int:
        """Return the number of ranks that share each row."""
        ...


class FurtherStepsSeam(Protocol):
    """``further_steps``: trains on after the steps of a phase. Used by ensembles."""

    def further_steps(self, config: RunConfig, phase: Phase, *, examples: int) -> int:
        """Return the optimizer steps after those over ``examples``; 0: none in this phase."""
        ...
