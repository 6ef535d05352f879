"""The hooks by which options take part in PPO; the phase and its trainer call them.

An option that takes part in PPO has a module ``hooks`` with the class ``HOOK``. A method is called
on all hooks in the order of ``rlhf.options.OPTIONS``. A hook that changes an argument receives the
argument as the previous hook returned it. ``HooksSeam`` names the options that have hooks.
"""

# ruff: noqa: ARG002, ARG003 - the methods of the base class ignore their arguments

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from rlhf.base.metrics import Metrics
from rlhf.base.seams import HooksSeam
from rlhf.base.types import Rollout, StatefulWithTensors
from rlhf.config.choices import When
from rlhf.config.schema.run import RunConfig
from rlhf.options import modules_of

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


class PpoHook:
    """The base class of the options' hooks in PPO. Its own methods change nothing."""

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
        """Return the steps from scores to advantages: more at the end, or with one replaced."""
        return steps

    def change_surrogate(self, surrogate: Surrogate) -> Surrogate:
        """Return ``surrogate``, changed or replaced."""
        return surrogate

    def annotate_scored_rollout(self, trainer: PPOTrainer, rollout: Rollout) -> Rollout:
        """Return ``rollout``, which has just been scored, with measures or extras added."""
        return rollout

    def add_gradient(self, trainer: PPOTrainer, learners: Sequence[Learner]) -> Metrics:
        """Backpropagate the option's loss before the optimizer step; return the loss's metrics."""
        return {}

    def finish_step(self, trainer: PPOTrainer) -> None:
        """Change models after the last update of a step; the step's checkpoint comes later."""

    # The function ``run_ppo`` calls the methods from here on.

    def prepare(self, trainer: PPOTrainer, loader: PromptLoader) -> dict[str, StatefulWithTensors]:
        """Prepare for the first step; return the objects that checkpoints store, by name."""
        return {}

    def prepare_rollout(
        self,
        trainer: PPOTrainer,
        rollout: Rollout,
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
        """End the processes of the hook."""


def build_hooks(config: RunConfig, context: RunContext | None = None) -> list[PpoHook]:
    """Build the hooks of the options that ``config`` switches on.

    A training loop outside of this package has no ``context``; then the hooks read no data.
    """
    modules: Iterator[HooksSeam] = modules_of("hooks", config)
    return [module.HOOK.build(config, context) for module in modules]
