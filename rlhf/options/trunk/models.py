"""PPO's models as branches of a shared trunk, their checks, and the export of the critic.

Shapes: B = sequences, S = tokens of whole sequences, N = kept tokens.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from rlhf.base.metrics import Metrics
from rlhf.base.types import Engine, LogprobOptions, SequenceBatch, TokenPositions
from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.options.trunk.trunk import (
    SharedTrunk,
    TrunkOutput,
    build_critic_skeleton,
    select_critic_state,
)
from rlhf.phases.ppo.models import Learner
from rlhf.phases.ppo.objective import MicroBatch
from rlhf.phases.shared.exporting import Export
from rlhf.phases.shared.model_checks import build_weightless_model
from rlhf.phases.shared.policies import build_policy
from rlhf.phases.shared.scoring import ModelOutputs, Rewards, Scores, WholeSequences
from rlhf.run.model_folder import tensors_to_save

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.phases.ppo.loop import Objective
    from rlhf.phases.ppo.rlhf_engine import RLHFEngine


def build_ppo_models(engine: RLHFEngine) -> TrunkModels:
    """Build the trunk of PPO and the engine that trains it."""
    config = engine.config
    trunk = SharedTrunk(
        build_policy(config, engine.tokenizer, dropout=config.ppo.actor_dropout).pretrained,
        num_layers_unfrozen=config.ppo.num_layers_unfrozen or 0,
        num_value_layers=config.ppo.num_value_layers,
    )
    engine.require_enough_positions(trunk.pretrained, key="model")
    return TrunkModels(
        engine.build_learner(trunk, Role.actor),
        engine.scores,
        engine.rewards,
        temperature=config.rollout.temperature,
        entropy_gradient=config.ppo.entropy_coef > 0,
    )


def build_critic_export(trunk: Engine, tokenizer: PreTrainedTokenizerBase) -> Export:
    """Return how to save a shared trunk's critic as a separate model."""
    assert isinstance(trunk.module, SharedTrunk)
    tensors = select_critic_state(trunk.module, tensors_to_save(trunk.module))
    return Export(build_critic_skeleton(trunk.module, tokenizer), trunk, tensors)


def check_models(config: RunConfig, phases: Container[Phase]) -> None:
    """Raise an error if the policy has too few layers, or its layers' names are unknown."""
    if Phase.ppo not in phases:
        return
    if policy := build_weightless_model("AutoModelForCausalLM", "model", config.model):
        SharedTrunk(
            policy,
            num_layers_unfrozen=config.ppo.num_layers_unfrozen or 0,
            num_value_layers=config.ppo.num_value_layers,
        )


class TrunkEngine(Engine, Protocol):
    """An engine that trains a shared trunk."""

    def __call__(
        self,
        ids_BS: Tensor,
        positions: TokenPositions,
        options: LogprobOptions,
        /,
        *,
        with_policy: bool = True,
        with_reference: bool = False,
    ) -> TrunkOutput:
        """Run the trunk once for all its branches."""


class TrunkModels:
    """Policy, critic and reference as branches of one trunk; implements ``ScoringModels``."""

    critic: None = None  # the trunk's optimizer trains the critic's weights too

    def __init__(
        self,
        trunk: TrunkEngine,
        scores: Scores,
        rewards: Rewards | None = None,
        *,
        temperature: float,
        entropy_gradient: bool = False,
    ) -> None:
        self.actor = trunk
        self.scores = scores
        self.rewards = rewards
        self._scoring = LogprobOptions(temperature, with_entropy=False)
        self._training = LogprobOptions(temperature, entropy_gradient=entropy_gradient)

    def score(self, sequences: WholeSequences, *, with_policy: bool = True) -> ModelOutputs:
        """Run the trunk once for policy, reference and values, and then the reward model."""
        with self.actor.evaluating():
            output = self.actor(
                sequences.ids_BS,
                sequences.positions,
                self._scoring,
                with_policy=with_policy,
                with_reference=True,
            )
        assert output.reference is not None
        policy = None if output.policy is None else sequences.scatter_logprobs(output.policy)
        return ModelOutputs(
            None if policy is None else policy.logprobs_BT,
            sequences.scatter_logprobs(output.reference).logprobs_BT,
            sequences.select_predicting_positions(output.values_BS),
            sequences.last_token_values(output.values_BS),
            *self.scores(sequences),
        )

    def learner_groups(self, *, trains_actor: bool) -> list[list[Learner]]:
        """Return one group with one learner: the trunk, which trains policy and critic at once."""
        assert trains_actor, "a shared trunk cannot train only the critic"
        return [[Learner(Role.actor, self.actor, self._compute_loss)]]

    def actor_logprobs(self, batch: SequenceBatch) -> Tensor:
        """Return the policy's log-probabilities (N,) of the kept tokens."""
        options = LogprobOptions(with_entropy=False)
        output = self.actor(batch.ids_BS, TokenPositions.from_batch(batch), options)
        assert output.policy is not None
        return output.policy.logprobs_N

    def _compute_loss(self, batch: MicroBatch, objective: Objective) -> tuple[Tensor, Metrics]:
        sequences = batch.sequences
        output = self.actor(sequences.ids_BS, sequences.positions, self._training)
        assert output.policy is not None
        values_BT = sequences.select_predicting_positions(output.values_BS)
        critic_loss, values = objective.critic_loss(values_BT, batch)
        policy = sequences.scatter_logprobs(output.policy)
        actor_loss, found = objective.actor_loss(policy, batch)
        return critic_loss + actor_loss, values | found
