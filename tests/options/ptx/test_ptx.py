"""The corpus beside PPO: one optimiser step sees both gradients, each with its weight."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.base.errors import ConfigError
from rlhf.config.batches import BatchPlan
from rlhf.config.effects import effect_of
from rlhf.config.freeze import to_run_config
from rlhf.options.ptx.corpus import PtxBlocks
from rlhf.options.ptx.hooks import CorpusHook, PtxCorpus, corpus_perplexity
from rlhf.phases.ppo.loop import PPOTrainer
from tests.conftest import Compose
from tests.phases.ppo.ppo_pieces import PARTS, assert_gradient, separate_engine, some_rollout

PLAN = BatchPlan(per_rank=3, micro=2, accumulation=2)  # the second micro-batch has one block
BLOCKS = [
    torch.randint(2, 258, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (6, 3, 9, 2, 7)
]
COEFFICIENT = 0.25


def corpus() -> PtxCorpus:
    return PtxCorpus(PtxBlocks(BLOCKS, []), PLAN, seed=1)


def nats(module: nn.Module, blocks: list[list[int]]) -> Tensor:
    """Loss of every token that is predicted, each block alone."""
    losses = []
    for ids in blocks:
        logits_SV = module.pretrained(torch.tensor([ids])).logits[0, :-1]
        losses.append(-logits_SV.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]])
    return torch.cat(losses)


def trained(compose: Compose, *overrides: str, with_corpus: bool) -> Any:
    """An engine after one rollout, what its step told, and the trainer."""
    engine = separate_engine(ptx_parts=PLAN.accumulation if with_corpus else 0)
    coefficient = f"ppo.ptx_coef={COEFFICIENT if with_corpus else 0}"
    config = to_run_config(compose(["ppo.ppo_epochs=2", coefficient, *overrides]))
    trainer = PPOTrainer(engine, config.ppo, [CorpusHook(config, corpus())])
    return engine, trainer.train_rlhf(some_rollout()), trainer


def test_each_update_adds_the_mean_loss_of_the_next_blocks(compose: Compose) -> None:
    """A weight of 0 uses no corpus."""
    engine, stats, trainer = trained(compose, with_corpus=True)
    trainer.train_rlhf(some_rollout())
    alone, _, without = trained(compose, with_corpus=False)
    without.train_rlhf(some_rollout())
    assert len(engine.actor.gradients) == 4, "both are in one optimiser step"
    assert engine.actor.micro_steps == 4 * (PARTS + PLAN.accumulation)
    assert alone.actor.micro_steps == engine.critic.micro_steps == 4 * PARTS
    losses = []
    updates = zip(engine.actor.gradients, alone.actor.gradients, strict=True)
    for update, (both, ppo) in enumerate(updates):
        losses.append(nats(engine.actor.module, corpus().blocks_of_update(update, PLAN.per_rank)))
        rest = {name: both[name] - ppo[name] for name in both}
        assert_gradient(rest, COEFFICIENT * losses[-1].mean(), engine.actor.module)
    assert stats.metrics["ppo/ptx_loss"] == pytest.approx(
        torch.cat(losses[:2]).mean().item(), rel=1e-5
    )


def test_while_the_actor_rests_the_corpus_rests_too(compose: Compose) -> None:
    engine, stats, trainer = trained(
        compose, "ppo.actor_freeze_steps=1", "ppo.ppo_epochs=1", with_corpus=True
    )
    assert engine.actor.micro_steps == 0
    assert "ppo/ptx_loss" not in stats.metrics
    assert "ppo/ptx_loss" in trainer.train_rlhf(some_rollout()).metrics
    assert len(engine.actor.gradients) == 1


def test_an_epoch_takes_every_block_once(compose: Compose) -> None:
    steps = [corpus().blocks_of_update(update, PLAN.per_rank) for update in range(5)]
    taken = [tuple(ids) for step in steps for ids in step]
    assert sorted(taken) == sorted(tuple(ids) for ids in 3 * BLOCKS)
    assert set(taken[:5]) == set(map(tuple, BLOCKS))
    assert taken[:5] != taken[5:10]


def test_a_weight_without_a_corpus_is_refused(compose: Compose) -> None:
    config = to_run_config(compose(["ppo.ptx_coef=0.5"])).ppo
    with pytest.raises(ConfigError, match=r"ppo\.ptx_coef=0\.5: there is no corpus.*ptx_coef=0"):
        PPOTrainer(separate_engine(), config)


@pytest.mark.parametrize("count", [1, 4])
def test_perplexity_is_that_of_the_tokens_together(count: int) -> None:
    engine = separate_engine(dropout=0.5)
    expected = math.exp(nats(separate_engine().actor.module.eval(), BLOCKS[:count]).mean().item())
    assert corpus_perplexity(engine, BLOCKS[:count]) == pytest.approx(expected, rel=1e-5)
    assert engine.actor.module.training


@pytest.mark.parametrize("key", ["path", "subset", "column"])
def test_a_run_that_starts_from_another_chooses_its_own_corpus(key: str) -> None:
    assert not effect_of(f"data.ptx_{key}").is_inherited
