"""The hook that moves the reference towards the policy, and stores it in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlhf.base.ranks import Ranks
from rlhf.base.types import StatefulWithTensors
from rlhf.engine.masters import Masters
from rlhf.engine.training_state import TrainingState, whole_pieces
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.models import SeparateModels
from rlhf.phases.ppo.prompts import PromptLoader
from rlhf_lab.moving_reference import MovingReferenceKeys


@torch.no_grad()
def mix_weights(reference: nn.Module, policy: nn.Module, *, share: float) -> None:
    """Set each weight of ``reference`` to share * policy + (1 - share) * reference.

    https://arxiv.org/abs/2404.09656. Both have the same parameters, unsharded. The mixture is
    computed in fp32 and rounded once; with a share of 1 the weights are equal bit for bit.
    """
    policy_weights = dict(policy.named_parameters())
    for name, parameter in reference.named_parameters():
        mixed = parameter.float().lerp(policy_weights.pop(name).float(), share)
        parameter.copy_(mixed)
    assert not policy_weights, "the policy has weights that the reference lacks"


class StoredWeights:
    """The weights of a frozen model as a part of checkpoints; every rank has all weights."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        weights = dict(module.named_parameters())
        masters = Masters([*weights.values()], lambda: None)
        self.training_state = TrainingState(whole_pieces(weights), masters, [], None, ranks)

    def state_dict(self) -> dict[str, Any]:
        """Return {}, since the state consists only of tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the training state restores the tensors."""


class MovingReferenceHook(PpoHook):
    """A hook that moves the reference every ``ppo.reference_every`` steps."""

    def finish_step(self, trainer: PPOTrainer) -> None:
        """Move the reference if this is due; it then scores the rollout of the next step."""
        keys = MovingReferenceKeys.of(self.config)
        if trainer.steps_done % keys.reference_every == 0:
            policy, reference = trainer.engine.actor.module, _reference_module(trainer)
            mix_weights(reference, policy, share=keys.reference_share)

    def prepare(self, trainer: PPOTrainer, loader: PromptLoader) -> dict[str, StatefulWithTensors]:
        """Return the reference, which checkpoints store."""
        return {"reference": StoredWeights(_reference_module(trainer), trainer.engine.ranks)}


def _reference_module(trainer: PPOTrainer) -> nn.Module:
    models = trainer.engine.models
    assert isinstance(models, SeparateModels), "the rules refuse models that share weights"
    with models.reference.evaluating() as module:
        return module
