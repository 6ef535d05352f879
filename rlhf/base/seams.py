"""Interfaces of the seams: the functions and values of an option's module that the core uses.

A seam has the name of its module. ``modules_of(NAME)`` of rlhf/options/__init__.py yields the
modules NAME of the options, and ``hooks_of(NAME, HOOK)`` the values of those that have HOOK: they
have only what their option needs. A caller annotates them with the class below that describes NAME.
Importing this file imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from datasets import Dataset
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
    from rlhf.config.choices import Dtype, Phase, RewardKind
    from rlhf.config.roles import Role
    from rlhf.config.schema.keys import Unread
    from rlhf.config.schema.model import ModelConfig
    from rlhf.config.schema.rewards import RewardTerm
    from rlhf.config.schema.run import RunConfig
    from rlhf.data.collate import PairStep
    from rlhf.data.records import Record
    from rlhf.data.splits import PhaseData
    from rlhf.engine.masters import AdamwUpdate
    from rlhf.engine.settings import OptimizerSettings
    from rlhf.models.language_model import LanguageModel, Scorer
    from rlhf.models.model_uses import ModelUse
    from rlhf.models.sources import ModelSource
    from rlhf.phases.ppo.hooks import PpoHook
    from rlhf.phases.ppo.models import PpoModels
    from rlhf.phases.ppo.rlhf_engine import RLHFEngine
    from rlhf.phases.reward import RewardTrainer
    from rlhf.phases.shared.backends import BackendParts
    from rlhf.phases.shared.context import RunContext
    from rlhf.phases.shared.exporting import Export
    from rlhf.plan.phase_memory import PhaseMemory
    from rlhf.plan.phase_plan import PhasePlan
    from rlhf.plan.time_model import Efficiency
    from rlhf.report.charts import RunFiles
    from rlhf.report.run_charts import ChartSection
    from rlhf.rewards.rules import ScoreFunction
    from rlhf.rollout.decoders.decoder import Decoder, DrawingDecoder
    from rlhf.rollout.decoders.layers import AdapterOf
    from rlhf.rollout.sampling import SamplingSettings

# A function that extends a built model; the tuple has the name of a new head, if it has one.
Extension = Callable[["PreTrainedModel", tuple[str, ...]], None]


class SourcesSeam(Protocol):
    """``sources``: makes the records of a run, instead of reading them from data sets.

    Used by environments.
    """

    def load_records(self, config: RunConfig) -> dict[Phase, PhaseData]:
        """Return the records of the run's phases, divided by data.split."""


class BackendsSeam(Protocol):
    """``backends``: samples responses instead of the core's backends.

    Used by hybrid_engine and vllm.
    """

    IS_SERVER: bool
    """True if a server samples, with one rollout's weights at a time, instead of the run's GPUs."""

    def check(self, config: RunConfig, model: PreTrainedConfig | None) -> None:
        """Raise an error if the backend cannot sample on this machine, or from this ``model``."""

    def build(self, config: RunConfig, parts: BackendParts) -> RolloutBackend:
        """Return the backend that samples the run's responses."""


class StepsSeam(Protocol):
    """``steps``: reads the trained models after each optimizer step.

    Used by replay.
    """

    def observe_step(
        self,
        context: RunContext,
        phase: Phase,
        step: int,
        engines: Mapping[str, StatefulWithTensors],
        *,
        is_last: bool,
    ) -> None:
        """Log facts of ``engines`` on every rank after step ``step``, before its checkpoint."""


class PhasesSeam(Protocol):
    """``phases``: trains a phase, or reuses the phase of another run with equal inputs.

    Used by phase_store.
    """

    def train_or_reuse(
        self,
        context: RunContext,
        phase: Phase,
        train: Callable[[], dict[str, Any]],
        reuse: Callable[[Path], None],
    ) -> None:
        """Call ``train``, or ``reuse`` with the folder of a stored phase that had equal inputs."""


class AverageKernel(Protocol):
    """A kernel that updates moving averages of fp32 weights stored in two 16-bit halves."""

    def update_averages(
        self, averages: Sequence[Tensor], halves: Sequence[tuple[Tensor, Tensor]], new: float
    ) -> None:
        """Update averages: average += new * (weight - average), with weights in 16-bit halves."""


class LogprobsKernel(Protocol):
    """A kernel that computes log-probs from logits (N, V), and the gradient of the logits.

    On a GPU rows may be padded to a multiple of 16 logits; the padding is overwritten.
    """

    def reduce_logits(
        self, logits_NV: Tensor, ids_N: Tensor, *, scale: float, outs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Write each row's log-sum-exp, entropy and logit of the token id to the three ``outs``.

        The logits are multiplied by ``scale`` first.
        """

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
        """Sample tokens (N,) by inverse CDF; return them and their fp32 log-probs (N,).

        ``draws_N`` are uniform random numbers. Where ``barred_N`` is True, ``end_id`` cannot be
        sampled.
        """


class SoftmaxKernel(Protocol):
    """A kernel that computes the softmax of rows, and the gradient of its inputs, in place."""

    def softmax_(self, scores: Tensor) -> Tensor:
        """Overwrite contiguous scores (..., S) with their softmax over S, and return them."""

    def gradient_(self, slopes: Tensor, shares: Tensor, *, scale: float) -> Tensor:
        """Overwrite ``slopes`` with ``scale`` times the gradient of softmax's inputs."""


class KernelsSeam(Protocol):
    """``kernels``: offers kernels for one type of device, which are faster than torch's.

    ``kernels_for`` of rlhf/options/__init__.py returns the kernels for a type of device, and
    compares them with torch first. A module has only some of the functions. A function returns None
    if there is no kernel, and may raise any error if the kernel does not run.
    rlhf/engine/masters.py explains how two 16-bit halves store an fp32 number. Used by cpu_kernels
    and gpu_kernels.
    """

    def summarize_kernels(self, dtype: Dtype) -> str | None:
        """Return one line that names the kernels of a run in ``dtype``; None to print no line."""

    def adamw_kernel(
        self, sizes: Sequence[int], device: torch.device, moments: torch.dtype
    ) -> AdamwUpdate | None:
        """Return the kernel for AdamW steps of fp32 parameters stored in 16-bit halves."""

    def average_kernel(self, sizes: Sequence[int], device: torch.device) -> AverageKernel | None:
        """Return the kernel for moving averages of fp32 parameters stored in 16-bit halves."""

    def logprobs_kernel(self, logits: Tensor) -> LogprobsKernel | None:
        """Return the kernel that computes log-probs from ``logits``."""

    def draw_kernel(self, logits: Tensor) -> DrawKernel | None:
        """Return the kernel that samples from ``logits``."""

    def softmax_kernel(self, scores: Tensor) -> SoftmaxKernel | None:
        """Return the kernel that computes the softmax of attention ``scores`` on a CPU."""

    def build_fused_decoder(
        self,
        parts: DecoderModules,
        adapter_of: AdapterOf,
        *,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
    ) -> DrawingDecoder | Decoder | None:
        """Return a decoder built from ``parts``, for ``rows`` sequences of ``tokens`` tokens."""

    def attention_kernel(
        self, kv_cache_2RKLD: Tensor, group: int
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None:
        """Return a function that computes the attention of one new token per row over a KV cache.

        Each key head serves ``group`` query heads. The arguments of the function are queries, keys,
        values, a KV cache like ``kv_cache_2RKLD``, which is still empty, and positions.
        """


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


class Partner(Protocol):
    """The other side of a conversation, which answers each turn of the policy during a rollout."""

    def wrap_backend(
        self, backend: RolloutBackend, tokenizer: PreTrainedTokenizerBase, ranks: Ranks
    ) -> RolloutBackend:
        """Return a backend whose responses are conversations; ``backend`` samples each turn."""

    def comparison_values(self, records: Sequence[Record]) -> dict[str, float]:
        """Return numbers to compare with results on ``records``, such as random play's return."""

    def close(self) -> None:
        """End the processes of the partner."""


class ResponsesSeam(Protocol):
    """``responses``: answers the turns of the policy, and measures and shows the conversations.

    Used by environments.
    """

    SUCCESS: str
    """The measure that is 1 if a response is right."""

    def open_partner(self, config: RunConfig) -> Partner:
        """Return a partner, whose processes run until it is closed."""

    def token_rewards(self, responses: Responses) -> Tensor:
        """Return the partner's rewards (B, T), of a part of ``rewards`` with kind=environment."""

    def measure_responses(self, responses: Responses) -> dict[str, Tensor]:
        """Return measures (B,) of the responses, named GROUP/NAME; the option chooses GROUP."""

    def evaluation_results(self, by_prompt: Mapping[str, list[float]], when: str) -> dict[str, Any]:
        """Return the entries of result.json for the evaluation ``when`` (before, after, ...).

        ``by_prompt`` has the values of each measure, one per prompt.
        """

    def texts_to_show(self, rollout: Rollout, texts: Sequence[str]) -> list[Shown]:
        """Return each row's texts for samples.jsonl; ``texts`` are the decoded responses."""


class Policy(NamedTuple):
    """The names of a policy that a run may have in its directory.

    ``POLICIES`` of a module ``keys`` has the policies that its option makes from trained policies.
    """

    name: str
    """The name in results and evaluations."""
    model: str
    """The name in samples and chats."""
    folder: str
    """The folder in the run directory."""
    label: str
    """The name in summaries and reports."""
    suffix: str = ""
    """The end of the measures' names in result.json, such as score_after_SUFFIX."""


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
    """``report``: adds rows to the summary of a run, and charts to its report.

    Used by branches, environments and rollout_log.
    """

    CHANGES: Mapping[str, str]
    """Measures of result.json with values before and after training, by label."""
    COMPARISON_VALUES: Mapping[str, str]
    """Numbers of result.json with which the score can be compared, by label."""

    def chart_sections(self, run: RunFiles) -> Sequence[ChartSection]:
        """Return sections of charts, and of answers for its samples, to add to the report."""


class ChatSeam(Protocol):
    """``chat``: plays an episode instead of a chat with a user. Used by environments."""

    FLAG: str
    """The flag of ``rlhf.chat`` that calls ``play_episode``; ``HELP`` describes the flag."""
    HELP: str
    PROMPT_MARK: str
    """A regular expression for the text before each prompt in samples.jsonl."""

    def was_trained_on_episodes(self, keys: Mapping[str, object]) -> bool:
        """Return True if a run with these keys trained its model on episodes."""

    def play_episode(
        self,
        run_dir: Path,
        talker: Talker,
        sampling: SamplingSettings,
        *,
        seed: int,
        write: Callable[[str], None],
    ) -> None:
        """Let ``talker``, a model of the run, play an episode; ``write`` prints what happens."""


class JobsSeam(Protocol):
    """``jobs``: prepares and checks a run before its ranks start.

    Used by environments, phase_store and ptx.
    """

    def complete_config(self, config: RunConfig, *, in_sweep: bool) -> RunConfig:
        """Return ``config`` with values filled in that depend on how the run is started."""

    def added_trial_overrides(self, words: Sequence[str]) -> list[str]:
        """Return overrides to add to ``words``, the overrides of a search's trial."""

    def check_data(
        self, config: RunConfig, phases: Collection[Phase], is_quick: Callable[[str, str], bool]
    ) -> None:
        """Raise a DataError if data of the option, other than examples, is unusable.

        Data at ``place``, the value of ``key``, is read only if ``is_quick(key, place)`` is True.
        """

    def has_slow_examples(self, config: RunConfig) -> bool:
        """Return True if examples take so long to make that the planner should make only a few."""


class Generation(NamedTuple):
    """The facts about the sampling of responses that determine a rollout's memory and time."""

    gathers: bool | None = None
    """True if sharded weights are gathered once per rollout; None: rollout.gather_weights."""
    tensor_parallel: int = 1
    """Number of ranks that share one copy of the weights."""
    caches_per_row: int = 1
    """Number of sequences whose KV cache is kept for each row that is decoded."""
    ends_early: bool = False
    """True if few responses use all tokens that they may have."""


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

    def adapt_generation(self, config: RunConfig, generation: Generation) -> Generation:
        """Return ``generation`` as the option changes it."""

    def adapt_efficiency(self, efficiency: Efficiency) -> Efficiency:
        """Return the shares of the peak rates that a GPU reaches with the option."""

    def added_step_seconds(
        self, config: RunConfig, phase: Phase, tokens: float, seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the seconds per step of ``phase`` of the option's activities, by name.

        ``tokens`` is the expected length of a response; ``seconds`` has the core's activities.
        """

    def num_added_evaluations(self, config: RunConfig) -> int:
        """Return the number of evaluations on the held-out prompts that the option adds."""

    def added_evaluation_seconds(self, scene: PhaseMemory, micro: int) -> float:
        """Return the seconds of the option's evaluations, in micro-batches of size ``micro``."""

    def adapt_ppo_plan(
        self,
        scene: PhaseMemory,
        plan: PhasePlan,
        plan_ppo: Callable[[PhaseMemory], PhasePlan],
        plan_rollout: Callable[[PhaseMemory, int, int], PhasePlan],
    ) -> PhasePlan:
        """Return ``plan``, changed if processes other than the ranks take part in PPO.

        ``plan_ppo(scene)`` plans PPO with the micro-batch and the rows of ``plan``.
        ``plan_rollout(scene, responses, rows)`` plans sampling, with ``rows`` decoded at once.
        """

    OFFLOADS: ClassVar[Mapping[str, str]]
    """The keys of ``zero`` that offload tensors of the option, each with the tensors' name."""

    def memory_saving_changes(self, config: RunConfig) -> Iterator[Saving]:
        """Yield changes of the option's keys with which the run needs less memory."""

    def idle_key_notes(self, config: RunConfig) -> Iterator[str]:
        """Yield a sentence for each key that has no effect with the option."""

    def cost_warnings(self, config: RunConfig, phases: Collection[Phase]) -> Iterator[str]:
        """Yield a sentence for each reason why ``phases`` may cost more than the user expects."""


class HooksSeam(Protocol):
    """``hooks``: takes part in the steps of PPO.

    Used by ahead, average, biases, branches, clip_cov, corrections, distillation, environments,
    gdpo, moving_reference, ptx, resampling and rollout_log.
    """

    HOOK: type[PpoHook]
    """The class of the hook; PpoHook describes the methods."""


class ModelsSeam(Protocol):
    """``models``: changes how models are built, optimized, checked and saved.

    Used by average, distillation, ensembles, fused_layers, hybrid_engine, lora and trunk.
    """

    def extend_model(
        self,
        config: RunConfig,
        role: Role,
        seed: int,
        model: PreTrainedModel,
        head: tuple[str, ...],
    ) -> None:
        """Add or replace parts of a built ``model``; ``head`` names its new, trained head."""

    def change_optimizer_settings(
        self, settings: OptimizerSettings, config: RunConfig, phase: Phase, role: Role
    ) -> OptimizerSettings:
        """Return changed settings of the optimizer that trains the model ``role`` in ``phase``."""

    def find_reference(
        self, config: RunConfig, phase: Phase, actor: TokenEngine
    ) -> TokenModel | ModelSource | None:
        """Return the reference of ``phase``, or where to load it; None: a copy of the policy."""

    def find_export(
        self, config: RunConfig, engine: Engine, source: ModelSource | None
    ) -> Export | None:
        """Return how to save the engine's model; None to save its own tensors.

        ``source`` is the model that training started from; None to save an ordinary model with
        all weights.
        """

    def complete_reward_model(
        self, scorer: Scorer, source: ModelSource, keys: Mapping[str, Any]
    ) -> nn.Module:
        """Return the reward model of a finished run with these ``keys``, built on ``scorer``."""

    def build_reward_trainer(
        self, context: RunContext, steps: list[PairStep], pairs: Dataset
    ) -> RewardTrainer:
        """Return the reward model's trainer, which takes ``steps`` and then the option's steps."""

    def actor_deepspeed_sections(self, config: RunConfig) -> Mapping[str, Any]:
        """Return sections for the actor's DeepSpeed config; any section requires DeepSpeed."""

    def adapt_policy(self, policy: LanguageModel) -> None:
        """Change PPO's policy; called before the actor's engine is built."""

    def adapt_actor_of_engine(self, module: nn.Module) -> Mapping[str, float]:
        """Change PPO's actor once its engine is built; return metrics to log with every step."""

    def build_ppo_models(self, engine: RLHFEngine) -> PpoModels:
        """Return the models of PPO; without this function each has an engine of its own."""

    def build_critic_export(self, actor: Engine, tokenizer: PreTrainedTokenizerBase) -> Export:
        """Return how to save the critic of ``build_ppo_models`` as a separate model."""

    def check_tokenizer(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise an error if a model of the option has other tokens than the run's ``tokenizer``."""

    def check_models(self, config: RunConfig, phases: Collection[Phase]) -> None:
        """Raise an error if a model of ``phases`` lacks layers that the option's keys require."""


class KeysSeam(Protocol):
    """``keys``: the option's configuration keys, in dataclasses.

    The config groups of a run inherit from these classes. Used by every option with keys.
    """

    UNREAD: ClassVar[Mapping[str, Unread]]
    """Keys of the core that have no effect with this option, with the reason; optional."""
    FILES: ClassVar[Sequence[str]]
    """Keys that name a file, or code by MODULE:NAME; optional."""
    COLUMN: ClassVar[str]
    """The key that names a column of the data, which PPO reads; optional."""
    ON_ONE_RANK: ClassVar[Mapping[str, object]]
    """Values of keys with which one rank needs neither a server nor a drive; optional."""
    REWARDS: ClassVar[Mapping[RewardKind, Sequence[str]]]
    """Keys that a kind of reward reads; * after a required key."""
    REWARD_FILES: ClassVar[Sequence[str]]
    """Keys of a part of ``rewards`` that name a file; optional."""
    ANSWERS: ClassVar[str]
    """Name of a file in the run directory from which a replay takes answers from outside."""
    LOG: ClassVar[str]
    """Name of a file in the run directory to which rank 0 appends; optional."""
    SCRATCH: ClassVar[str]
    """Folder of a phase that the run needs only while it runs; optional."""
    MEASURES: ClassVar[MeasureNames]
    """Names of what the option measures; optional."""
    POLICIES: ClassVar[Sequence[Policy]]
    """Policies that the option makes from trained policies; optional."""


class RulesSeam(Protocol):
    """``rules``: refuses values of the option's keys, and computes sizes from them.

    Used by every option whose keys need, exclude or change keys of the core.
    """

    def check(self, config: RunConfig) -> None:
        """Raise ConfigError if a rule is broken; called after the core's rules."""

    def check_before_core_rules(self, config: RunConfig) -> None:
        """Do as ``check`` does, but before the core's rules. Used by environments."""

    def check_batches(self, config: RunConfig) -> None:
        """Raise ConfigError if a rule is broken; called after the core has divided batches.

        Used by branches and ptx.
        """

    def reward_warnings(self, config: RunConfig) -> Iterator[str]:
        """Yield a warning for each doubtful part of ``rewards``; printed before any training."""

    def token_limit_after_prompt(self, config: RunConfig) -> tuple[str, int]:
        """Return the key, and its value, that limits the number of tokens after a prompt."""

    def max_policy_tokens(self, config: RunConfig) -> int:
        """Return the maximum number of tokens that the policy can write after a prompt."""

    def num_added_steps(self, config: RunConfig, phase: Phase, *, examples: int) -> int:
        """Return the number of optimizer steps to add to the steps over ``examples`` examples."""

    def num_added_actor_micro_batches(self, config: RunConfig) -> int:
        """Return the number of micro-batches to add to an optimizer step of PPO's actor."""
