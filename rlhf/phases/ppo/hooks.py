"""The hooks by which options and methods take part in PPO; the phase and its trainer call them.

Each method is called on all hooks, in the order of their classes in ``hook_classes``; ``close`` in
the reverse order. A hook that changes an argument receives it as the previous hook returned it.
"""

# ruff: noqa: ARG002, ARG003 - the methods of the base class ignore their arguments

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from rlhf.base.metrics import Metrics
from rlhf.base.types import Rollout, StatefulWithTensors
from rlhf.config.choices import When
from rlhf.config.schema.run import RunConfig
from rlhf.methods import Part, classes_of, methods_in_use
from rlhf.options.ptx.rules import uses_corpus

if TYPE_CHECKING:
    from rlhf.phases.ppo.loop import PPOTrainer
    from rlhf.phases.ppo.models import Learner
    from rlhf.phases.ppo.objective import Surrogate
    from rlhf.phases.ppo.prompts import PromptLoader
    from rlhf.phases.ppo.rlhf_engine import RLHFEngine
    from rlhf.phases.ppo.targets import TargetSteps
    from rlhf.phases.shared.context import RunContext
    from rlhf.phases.shared.policy_evaluation import HeldOutPrompts


class ActorVariant(NamedTuple):
    """An alternative to the actor's last weights, such as their moving average.

    After the last step, the phase evaluates these weights, saves them and samples from them.
    """

    name: str  # NAME in the folder actor_NAME, and in entries of result.json ending in after_NAME
    what: str  # the first line of the model card
    swap_in: Callable[[], AbstractContextManager[None]]


class PpoHook(Part):
    """The base class of the hooks of options and methods in PPO; by default, hooks change nothing.

    ``rlhf.methods.Method.hook`` returns the class of a method's hook.
    """

    samples_older_policy: ClassVar[bool] = False  # True: an older policy samples responses

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @classmethod
    def build(cls, config: RunConfig, context: RunContext | None) -> Self:
        """Build the hook, with the data that it reads; without ``context`` it reads no data."""
        return cls(config)

    @classmethod
    def check_data(cls, context: RunContext) -> None:
        """Raise DataError if the hook cannot use PPO's rows; called before the first phase."""

    @property
    def logprob_reuse_mode_for_auto(self) -> When | None:
        """Return the mode that replaces rollout.reuse_logprobs=auto; None to keep auto."""
        return None

    # PPOTrainer calls the methods from here to ``finish_step``.

    def change_target_steps(self, steps: TargetSteps) -> TargetSteps:
        """Return the steps from scores to advantages, with one replaced or others appended."""
        return steps

    def change_surrogate(self, surrogate: Surrogate) -> Surrogate:
        """Return ``surrogate``, changed or replaced."""
        return surrogate

    def annotate_scored_rollout(self, trainer: PPOTrainer, rollout: Rollout) -> Rollout:
        """Return ``rollout``, which has just been scored, with measures or extras added."""
        return rollout

    def add_gradient(self, trainer: PPOTrainer, learners: Sequence[Learner]) -> Metrics:
        """Backpropagate a further loss of ``learners`` before they step; return its metrics."""
        return {}

    def finish_step(self, trainer: PPOTrainer) -> None:
        """Change models after the last update of a step; the step's checkpoint comes later."""

    # The function ``run_ppo`` calls the methods from here on.

    def prepare(self, trainer: PPOTrainer, loader: PromptLoader) -> dict[str, StatefulWithTensors]:
        """Prepare for the first step; return further objects that checkpoints store, by name."""
        return {}

    def prepare_rollout(
        self, trainer: PPOTrainer, rollout: Rollout
    ) -> tuple[Rollout, dict[str, float]]:
        """Return the rollout to train on, and metrics to log with the step."""
        return rollout, {}

    def results(self, engine: RLHFEngine, prompts: HeldOutPrompts, when: str) -> dict[str, Any]:
        """Return entries of result.json; ``when`` is before, after or after_NAME of a variant."""
        return {}

    def actor_variants(self, engine: RLHFEngine) -> list[ActorVariant]:
        """Return alternative weights of the actor, which the phase evaluates and saves."""
        return []

    def close(self) -> None:
        """End the hook's processes, after the phase has ended or failed."""


def build_hooks(config: RunConfig, context: RunContext | None = None) -> list[PpoHook]:
    """Build the hooks of the options and methods that ``config`` switches on.

    A training loop outside of this package has no ``context``; then the hooks read no data.
    """
    return [hook.build(config, context) for hook in hook_classes(config)]


def hook_classes(config: RunConfig) -> list[type[PpoHook]]:
    """Return the classes of the hooks that take part in PPO, in the order of their calls."""
    ppo = config.ppo
    hooks: list[type[PpoHook]] = []
    if config.environment.is_used:
        from rlhf.options.environments.hooks import EpisodeHook

        hooks.append(EpisodeHook)
    if config.rollout.lag > 0:
        from rlhf.options.ahead.hooks import AheadHook

        hooks.append(AheadHook)
    hooks += classes_of(PpoHook, (method.hook() for method in methods_in_use(config)))
    if ppo.uses_corrections:
        from rlhf.options.corrections.hooks import CorrectionHook

        hooks.append(CorrectionHook)
    if uses_corpus(config):
        from rlhf.options.ptx.hooks import CorpusHook

        hooks.append(CorpusHook)
    if ppo.ema_beta > 0:
        from rlhf.options.average.hooks import AverageHook

        hooks.append(AverageHook)
    if ppo.log_rollouts_every > 0:
        from rlhf.options.rollout_log.hooks import RolloutLogHook

        hooks.append(RolloutLogHook)
    return hooks
