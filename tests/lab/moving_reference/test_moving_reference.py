"""The reference moves towards the policy in steps, and is a part of checkpoints.

tests/runtime/test_resume.py resumes a run with a moving reference; bad_commands.txt has what is
refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlhf.base.ranks import Ranks
from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.config.typed import to_run_config
from rlhf.models.model_uses import models_in_phase
from rlhf.phases.ppo.hooks import build_hooks
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf_lab.moving_reference.hooks import StoredWeights, mix_weights
from tests.conftest import Compose
from tests.phases.ppo.ppo_pieces import separate_engine, some_rollout


def some_module(seed: int, dtype: torch.dtype) -> nn.Module:
    """A module with weights of several shapes and scales."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.1, 0.6, 1.0])
def test_weights_are_mixed_as_a_slow_loop_mixes_them(share: float, dtype: torch.dtype) -> None:
    reference, policy = some_module(1, dtype), some_module(2, dtype)
    pairs = zip(reference.parameters(), policy.parameters(), strict=True)
    expected = [
        [
            share * theirs + (1 - share) * ours
            for ours, theirs in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)
        ]
        for a, b in pairs
    ]
    mix_weights(reference, policy, share=share)
    for found, numbers in zip(reference.parameters(), expected, strict=True):
        exact = torch.tensor(numbers, dtype=torch.float64).view_as(found)
        near = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]  # one rounding
        torch.testing.assert_close(found.detach().double(), exact, rtol=near, atol=1e-7)
        assert not found.grad_fn
    if share == 1:
        assert all(map(torch.equal, reference.parameters(), policy.parameters()))


def weights_of(module: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in module.parameters()]


def test_the_reference_moves_after_its_steps_only(compose: Compose) -> None:
    config = to_run_config(compose(["ppo.reference_every=2", "ppo.reference_share=0.25"]))
    engine = separate_engine(lr=0.05)
    trainer = PPOTrainer(engine, config.ppo, build_hooks(config))
    reference, policy = engine.models.reference.module, engine.actor.module
    start = weights_of(reference)
    trainer.train_rlhf(some_rollout())
    assert all(map(torch.equal, weights_of(reference), start))
    trainer.train_rlhf(some_rollout())
    moved, learned = weights_of(reference), weights_of(policy)
    for before, after, ours in zip(start, moved, learned, strict=True):
        torch.testing.assert_close(after, 0.75 * before + 0.25 * ours)
    assert not all(map(torch.equal, moved, start))
    trainer.train_rlhf(some_rollout())
    assert all(map(torch.equal, weights_of(reference), moved))


@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_of_any_ranks_has_the_whole_reference(compose: Compose, size: int) -> None:
    config = to_run_config(compose(["ppo.reference_every=1"]))
    engine = separate_engine()
    trainer = PPOTrainer(engine, config.ppo, build_hooks(config))
    (hook,) = trainer.hooks
    nothing: Any = None
    stored: dict[str, dict[int, torch.Tensor]] = {}
    for rank in range(size):
        engine.ranks = Ranks(rank, size)
        for name, start, part in hook.prepare(trainer, nothing)[
            "reference"
        ].training_state.stream():
            stored.setdefault(name, {})[start] = part.clone()
    whole = {name: torch.cat([parts[i] for i in sorted(parts)]) for name, parts in stored.items()}
    other = separate_engine().actor.module  # of another seed
    restored = StoredWeights(other, Ranks()).training_state
    restored.load(lambda name, part: whole[name][part])
    assert all(map(torch.equal, weights_of(other), weights_of(engine.models.reference.module)))
    assert restored.total_bytes == sum(each.nbytes for each in whole.values())


def test_plans_count_the_reference_in_checkpoints(compose: Compose) -> None:
    for every in (0, 3):
        config = to_run_config(compose([f"ppo.reference_every={every}", "model=opt_125m"]))
        stored = {use.role for use in models_in_phase(config, Phase.ppo) if use.is_stored}
        assert stored == ({Role.reference} if every else set())
