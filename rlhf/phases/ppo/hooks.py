"""The seam between PPO and its options: hooks, which the phase and its trainer call.

An option that takes part in PPO has a module ``hooks`` with the class ``HOOK``. The methods of all
hooks are called in the order of ``rlhf.options.OPTIONS``, each with what the one before returned.
Used by ahead, average, branches, corrections, environments, ptx and resampling.
"""

# ruff: noqa: ARG002, ARG003 - the methods of PpoHook change nothing

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Other weights of the actor, which the phase evaluates, saves and samples from at its end."""

    name: str  # of the folder actor_NAME, and of the entries of result.json that end in after_NAME
    what: str  # the first line of the model card
    swap_in: Callable[[], AbstractContextManager[None]]


class PpoHook:
    """An option's part in PPO. The methods of this class change nothing."""

    samples_older_policy: ClassVar[bool] = False  # responses have weights before the last update

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @classmethod
    def of_run(cls, config: RunConfig, context: RunContext | None) -> Self:
        """Return the hook of a run; None: of a loop of your own, where it reads no data."""
        return cls(config)

    @property
    def reuses_logprobs(self) -> When | None:
        """Return what rollout.reuse_logprobs=auto means with this option; None: as without it."""
        return None

    # The trainer calls these methods.

    def target_steps(self, steps: TargetSteps) -> TargetSteps:
        """Return the steps from scores to advantages, with steps added or replaced."""
        return steps

    def surrogate(self, surrogate: Surrogate, rollout: Rollout) -> Surrogate:
        """Return the actor's loss for the updates on ``rollout``."""
        return surrogate

    def after_scoring(self, trainer: PPOTrainer, rollout: Rollout) -> Rollout:
        """Return a rollout that has just been scored, with measures or extras added."""
        return rollout

    def add_gradient(self, trainer: PPOTrainer, learners: Sequence[Learner]) -> Metrics:
        """Backpropagate a loss of its own before ``learners`` step; return its metrics."""
        return {}

    # The phase calls these methods.

    def begin(self, trainer: PPOTrainer, loader: PromptLoader) -> Mapping[str, StatefulWithTensors]:
        """Prepare for the first step; return what checkpoints store, by name."""
        return {}

    def before_training(
        self,
        trainer: PPOTrainer,
        rollout: Rollout,
    ) -> tuple[Rollout, dict[str, float]]:
        """Return the rollout to learn from, and metrics of it."""
        return rollout, {}

    def results(self, engine: RLHFEngine, prompts: HeldOutPrompts, when: str) -> dict[str, Any]:
        """Return entries of result.json from an evaluation ``when``: before, after, ..."""
        return {}

    def actor_variants(self, engine: RLHFEngine) -> list[ActorVariant]:
        """Return other weights of the actor that are worth keeping."""
        return []

    def close(self) -> None:
        """End the processes of the hook."""


def build_hooks(config: RunConfig, context: RunContext | None = None) -> list[PpoHook]:
    """Return the hooks of the options that ``config`` switches on."""
    modules: Iterator[HooksSeam] = modules_of("hooks", config)
    return [module.HOOK.of_run(config, context) for module in modules]
