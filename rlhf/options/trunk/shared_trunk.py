"""PPO's models as branches of a shared trunk, their checks, and the export of the critic.

One pass through the frozen lower blocks serves actor, critic and reference, like trlx's hydra
models. The upper blocks are trained, and the reference is a frozen copy of them. The critic is a
linear head on the last hidden state of the actor, or of the critic's trained copy of top blocks.

Shapes: B = sequences, S = tokens of whole sequences, N = kept tokens.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rlhf.base.errors import ConfigError
from rlhf.base.metrics import Metrics
from rlhf.base.types import Engine, LogprobOptions, SequenceBatch, TokenLogprobs, TokenPositions
from rlhf.config.roles import Role
from rlhf.models.branch import Branch, find_block_and_tail_paths, record_calls
from rlhf.models.language_model import logprobs_at, replace_output_layer
from rlhf.models.output_layer import DEFAULT_OPTIONS
from rlhf.phases.ppo.models import Learner
from rlhf.phases.ppo.objective import MicroBatch, Objective
from rlhf.phases.shared.exporting import Export
from rlhf.phases.shared.policies import build_policy
from rlhf.phases.shared.scoring import ModelOutputs, RewardFunction, ScoreSequences, WholeSequences
from rlhf.run.model_folder import tensors_to_save

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlhf.phases.ppo.rlhf_engine import RLHFEngine


def build_trunk_models(engine: RLHFEngine) -> TrunkModels:
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


def build_trunk_critic_export(trunk: Engine, tokenizer: PreTrainedTokenizerBase) -> Export:
    """Return how to save a shared trunk's critic as a separate model."""
    assert isinstance(trunk.module, SharedTrunk)
    tensors = select_critic_state(trunk.module, tensors_to_save(trunk.module))
    return Export(build_critic_skeleton(trunk.module, tokenizer), trunk, tensors)


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
        scores: ScoreSequences,
        rewards: RewardFunction | None = None,
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
        critic_loss, critic_metrics = objective.critic_loss(values_BT, batch)
        policy = sequences.scatter_logprobs(output.policy)
        actor_loss, actor_metrics = objective.actor_loss(policy, batch)
        return critic_loss + actor_loss, critic_metrics | actor_metrics


class TrunkOutput(NamedTuple):
    """The output of a forward pass of the trunk: log-probs of tokens, and fp32 values (B, S)."""

    policy: TokenLogprobs | None
    reference: TokenLogprobs | None
    values_BS: Tensor


class SharedTrunk(nn.Module):
    """A causal language model whose upper blocks branch into actor, critic and reference.

    The top ``num_layers_unfrozen`` blocks and the norm after them are trained, and so is the output
    layer unless it is tied to the embeddings, which are frozen. The value head starts at zero; it
    reads the actor's last hidden state, or the last hidden state of the critic's own copy of the
    top ``num_value_layers`` blocks. As in trlx, the critic's loss trains the blocks that it reads.

    Raises:
        CapabilityError: if the names of the blocks of ``pretrained``'s family are unknown.
        ConfigError: if more layers are unfrozen or copied than the model allows.
    """

    def __init__(
        self, pretrained: PreTrainedModel, *, num_layers_unfrozen: int, num_value_layers: int = 0
    ) -> None:
        super().__init__()
        self.pretrained = pretrained
        block_list, tail_names = _find_block_and_tail_paths(pretrained)
        replace_output_layer(pretrained)
        base = pretrained.base_model
        blocks = list(base.get_submodule(block_list))
        tail = [base.get_submodule(name) for name in tail_names]
        _check_layer_counts(len(blocks), num_layers_unfrozen, num_value_layers)
        self.num_layers_unfrozen, self.num_value_layers = num_layers_unfrozen, num_value_layers
        output, embeddings = pretrained.get_output_embeddings(), pretrained.get_input_embeddings()
        untied_output = [] if output.weight is embeddings.weight else [output]

        top = blocks[len(blocks) - num_layers_unfrozen :]
        self.reference = Branch(top, tail)
        self.reference_output = deepcopy(output) if untied_output else None
        value_blocks = blocks[len(blocks) - num_value_layers :]
        self.value_branch = Branch(value_blocks, tail) if num_value_layers else None
        self.value_head = nn.Linear(output.in_features, 1, bias=False)
        nn.init.zeros_(self.value_head.weight)

        for module in pretrained.modules():
            if "layerdrop" in vars(module):
                module.layerdrop = 0.0  # never skip a block: branches need its recorded call
        self.requires_grad_(requires_grad=False)
        for part in [*top, *tail, *untied_output, self.value_branch, self.value_head]:
            if part is not None:
                part.requires_grad_(requires_grad=True)

    def train(self, mode: bool = True) -> SharedTrunk:
        """Set training or evaluation mode; the reference always runs without dropout."""
        super().train(mode)
        for module in (self.reference, self.reference_output):
            if module is not None:
                module.eval()
        return self

    def forward(
        self,
        ids_BS: Tensor,
        positions: TokenPositions,
        options: LogprobOptions = DEFAULT_OPTIONS,
        *,
        with_policy: bool = True,
        with_reference: bool = False,
    ) -> TrunkOutput:
        """Run one forward pass over right-padded sequences; return log-probs and values.

        The log-probs of policy or reference are None if they are not requested.
        """
        base = self.pretrained.base_model
        blocks = list(base.get_submodule(_find_block_and_tail_paths(self.pretrained)[0]))
        num_branched = max(self.num_layers_unfrozen, self.num_value_layers)
        with record_calls(blocks[len(blocks) - num_branched :]) as calls:
            last_BSH = base(input_ids=ids_BS, use_cache=False).last_hidden_state
        value_BSH = last_BSH
        if self.value_branch is not None:
            value_BSH = self.value_branch(calls[len(calls) - self.num_value_layers :])
        output = self.pretrained.get_output_embeddings()
        policy = reference = None
        if with_policy:
            policy = logprobs_at(output, last_BSH, positions, options)
        if with_reference:
            reference_BSH = self.reference(calls[len(calls) - self.num_layers_unfrozen :])
            reference = logprobs_at(
                self.reference_output or output, reference_BSH, positions, options
            )
        return TrunkOutput(policy, reference, self.value_head(value_BSH).squeeze(-1).float())


def select_critic_state(trunk: SharedTrunk, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Select the critic's weights from the trunk's ``state``, under the critic's own names."""
    prefix = trunk.pretrained.base_model_prefix
    blocks, tail = _find_block_and_tail_paths(trunk.pretrained)
    renamed = {f"pretrained.{prefix}.": f"{prefix}.", "value_head.": "score."}
    first_block = len(trunk.pretrained.base_model.get_submodule(blocks)) - trunk.num_value_layers
    for index in range(trunk.num_value_layers):
        renamed[f"value_branch.blocks.{index}."] = f"{prefix}.{blocks}.{first_block + index}."
    for index, name in enumerate(tail):
        renamed[f"value_branch.tail.{index}."] = f"{prefix}.{name}."
    # In this order the critic's own blocks overwrite the actor's blocks of the same name.
    return {
        name.replace(old, new, 1): tensor
        for old, new in renamed.items()
        for name, tensor in state.items()
        if name.startswith(old)
    }


def build_critic_skeleton(
    trunk: SharedTrunk, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Return the critic as a transformers model on the meta device, without weights."""
    from transformers import AutoModelForSequenceClassification

    config = deepcopy(trunk.pretrained.config)
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config)


def _find_block_and_tail_paths(model: PreTrainedModel) -> tuple[str, list[str]]:
    return find_block_and_tail_paths(model, needed_by="ppo.shared_trunk", off="false")


def _check_layer_counts(num_layers: int, num_layers_unfrozen: int, num_value_layers: int) -> None:
    if num_layers_unfrozen >= num_layers:
        raise ConfigError(
            f"ppo.num_layers_unfrozen={num_layers_unfrozen}: the model has {num_layers} layers, "
            f"and at least one of them must stay frozen; use at most {num_layers - 1}, or "
            "ppo.shared_trunk=false"
        )
    if num_value_layers > num_layers:
        raise ConfigError(
            f"ppo.num_value_layers={num_value_layers}: the model has {num_layers} layers; use at "
            f"most {num_layers}"
        )
