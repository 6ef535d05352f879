"""Train reward models, one or an ensemble, on preference pairs, and measure them.

Shapes: B = pairs, S = tokens of whole sequences, M = members of an ensemble.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf.algorithms.reward import (
    build_reward_loss,
    divergence_loss,
    end_loss,
    end_scores,
    regression_loss,
)
from rlhf.base.metrics import Mean, Metrics, loss_metrics
from rlhf.base.random_streams import random_stream, seed_for
from rlhf.base.types import PreferenceBatch
from rlhf.config.batches import phase_plans
from rlhf.config.choices import Phase, RewardLossName
from rlhf.config.roles import Role
from rlhf.data.pair_numbers import PairColumn
from rlhf.engine.select import AnyEngine, build_engine
from rlhf.engine.settings import optimizer_settings
from rlhf.engine.zero3_partition import build_parameter_placer
from rlhf.models.build import build_scorer, extensions_of, require_enough_positions
from rlhf.models.language_model import Scorer
from rlhf.options import RewardConfig
from rlhf.options.ensembles.keys import CombineName
from rlhf.options.ensembles.members import (
    Member,
    copy_first_member,
    grow_members,
    record_member_calls,
    swap_in_mean,
)
from rlhf.phases.reward_evaluation import RewardEvaluation, measure_scores
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.policies import reward_model_source
from rlhf.phases.shared.supervised import (
    Rows,
    collate_pair_rows,
    measure_held_out,
    split_table_rows,
    take_optimizer_steps,
)


class PairLoss(NamedTuple):
    """The loss on pairs that ``reward.loss`` selects."""

    config: RewardConfig

    def can_read(self, rows: Rows) -> bool:
        """Return True if ``rows`` have the margins or scores that the loss reads."""
        if self.config.loss is RewardLossName.regression:
            return PairColumn.chosen_score in rows
        return self.config.margin_column is None or PairColumn.margin in rows

    def __call__(
        self, chosen_BS: Tensor, rejected_BS: Tensor, batch: PreferenceBatch, rows: Rows
    ) -> Tensor:
        """Return the losses (B,) of one member's values; ``rows`` may have margins or scores."""
        chosen_B = end_scores(chosen_BS, batch.chosen.attend_BS)
        rejected_B = end_scores(rejected_BS, batch.rejected.attend_BS)
        if self.config.loss is RewardLossName.regression:
            chosen_wanted_B = chosen_B.new_tensor(rows[PairColumn.chosen_score])
            rejected_wanted_B = chosen_B.new_tensor(rows[PairColumn.rejected_score])
            return regression_loss(chosen_B, rejected_B, chosen_wanted_B, rejected_wanted_B)
        margin_B = torch.zeros_like(chosen_B)
        if self.config.margin_column is not None:
            margin_B = chosen_B.new_tensor(rows[PairColumn.margin])
        smoothing = self.config.label_smoothing
        if self.config.loss is RewardLossName.end:
            return end_loss(chosen_B, rejected_B, margin_B, label_smoothing=smoothing)
        return divergence_loss(
            chosen_BS, rejected_BS, batch, margin_B=margin_B, label_smoothing=smoothing
        )


class RewardTrainer:
    """A trainer that takes one optimizer step at a time on preference pairs.

    The first member of an ensemble learns like a single reward model. After ``start_members`` it
    is fixed, and the further members learn on hidden states of its lower blocks, which are computed
    once for all of them. Each has an engine of its own: its gradient is clipped, and its optimizer
    steps, as if it were trained alone.
    """

    def __init__(
        self, context: RunContext, *, num_pairs: int, first_steps: int, member_steps: int = 0
    ) -> None:
        config, self._context = context.config, context
        self._collate = partial(collate_pair_rows, context, max_tokens=config.reward.max_tokens)
        self.plan = phase_plans(config)[Phase.reward]
        settings, ranks = context.settings, context.ranks
        self._shared: Any = {"settings": settings, "plan": self.plan, "ranks": ranks}
        self.source = reward_model_source(config)
        self._loss = PairLoss(config.reward)
        seed = seed_for(config.seed, "reward_model")
        scorer = build_scorer(
            self.source,
            context.tokenizer,
            seed=seed,
            extensions=extensions_of(config, Role.reward_training, seed=seed),
            shard=build_parameter_placer(Role.reward_training, **self._shared),
        )
        require_enough_positions(
            scorer.pretrained,
            config.reward.max_tokens,
            key="reward_model",
            wanted="reward.max_tokens",
        )
        self.engines = {"model": self._build_engine(scorer, first_steps)}
        self._member_steps = member_steps
        self._waiting = _further_members(scorer, config.reward, seed=config.seed)
        self._pair_weights_MN = _pair_weights(config.reward, num_pairs, seed=config.seed)

    def start_members(self) -> None:
        """Fix the first member, and build the engines of the further members."""
        if self._context.config.reward.combine is CombineName.warm:
            for member in self._waiting:  # only weights with a common start can be averaged
                copy_first_member(self._scorer, member)
        for number, member in enumerate(self._waiting, start=1):
            self.engines[f"member_{number}"] = self._build_engine(member, self._member_steps)

    @property
    def averages(self) -> bool:
        """Return True if the mean of the members' weights is the reward model (WARM)."""
        return bool(self.members) and self._context.config.reward.combine is CombineName.warm

    @property
    def members(self) -> list[nn.Module]:
        """Return the further members that have started."""
        return [engine.module for name, engine in self.engines.items() if name != "model"]

    def train_step(
        self, numbers: Sequence[int], rows: Rows, weights: list[float], *, num_prompts: int
    ) -> dict[str, float]:
        """Take one step on this rank's share of a global batch, ``rows``; return the metrics.

        ``numbers`` are the places of the rows among all pairs. The loss of a member is the weighted
        sum over the pairs of all ranks, divided by ``num_prompts``.
        """
        started = time.monotonic()
        first, *further = self.engines.values()
        learners = further or [first]
        weights_MB = torch.tensor(weights).expand(len(learners), -1)
        if further:
            weights_MB = weights_MB * self._pair_weights_MN[:, list(numbers)]

        def losses_of(rows: Rows) -> Iterator[tuple[Tensor, Metrics]]:
            batch = self._collate(rows)
            weights_BM = torch.tensor(rows["weights"], device=self._context.ranks.device)
            for (chosen_BS, rejected_BS), weights_B in zip(
                self._values(batch, trains=True), weights_BM.unbind(1), strict=True
            ):
                result = build_reward_loss(  # pairs that are repeated as padding have weight 0
                    self._loss(chosen_BS, rejected_BS, batch, rows),
                    end_scores(chosen_BS, batch.chosen.attend_BS),
                    end_scores(rejected_BS, batch.rejected.attend_BS),
                    weights_B,
                )
                yield result.loss / num_prompts, loss_metrics(Phase.reward, result)

        parts = split_table_rows({**rows, "weights": weights_MB.T.tolist()}, self.plan.micro)
        metrics, values = take_optimizer_steps(
            self._context, Phase.reward, learners, parts, losses_of
        )
        loss = metrics["reward/loss"]
        assert isinstance(loss, Mean)
        pairs = int(loss.count) / len(learners)
        return values | {"reward/pairs_per_second": pairs / (time.monotonic() - started)}

    def evaluate(self, examples: Any) -> RewardEvaluation:
        """Return means over held-out pairs; of the loss too, if they have what it reads."""
        config = self._context.config.reward

        def measure(rows: Rows, keep_B: Tensor) -> Metrics:
            batch = self._collate(rows)
            values = list(self._values(batch))
            chosen_BM, rejected_BM = (
                torch.stack([end_scores(each[side], part.attend_BS) for each in values], dim=1)
                for side, part in enumerate(batch)
            )
            pairwise = config.loss is not RewardLossName.regression
            found = measure_scores(chosen_BM, rejected_BM, keep_B, is_pairwise=pairwise)
            if self._loss.can_read(rows):
                losses = [self._loss(*each, batch, rows) for each in values]
                found["loss"] = Mean.of(torch.stack(losses).mean(dim=0), keep_B)
            return found

        limit, micro = config.eval_examples, self.plan.micro
        found = measure_held_out(self._context, self, examples, measure, limit=limit, micro=micro)
        return RewardEvaluation({n: m for n, m in found.items() if isinstance(m, Mean)})

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the first member without dropout and gradients.

        With WARM the first member has the mean of the members' weights.
        """
        with ExitStack() as stack:
            for engine in self.engines.values():
                stack.enter_context(engine.evaluating())
            stack.enter_context(self.final_weights())
            yield self._scorer

    def final_weights(self) -> AbstractContextManager[None]:
        """Swap in the weights of the reward model: with WARM the mean over the members."""
        return swap_in_mean(self._scorer, self.members) if self.averages else nullcontext()

    def close(self) -> None:
        """Free the memory of the engines."""
        for engine in self.engines.values():
            engine.close()

    @property
    def _scorer(self) -> Scorer:
        scorer = self.engines["model"].module
        assert isinstance(scorer, Scorer)
        return scorer

    def _values(
        self, batch: PreferenceBatch, *, trains: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield values (B, S) of both sides, of each member that scores, or ``trains``, in turn."""
        ids_BS = batch.concatenate().ids_BS
        first, *further = self.engines.values()
        if not further or (self.averages and not trains):
            yield first(ids_BS).chunk(2)
            return
        with first.evaluating(), record_member_calls(self._scorer, self.members) as calls:
            values_of_first = first(ids_BS)
        if not trains:
            yield values_of_first.chunk(2)
        for engine in further:
            yield engine(calls).chunk(2)

    def _build_engine(self, module: nn.Module, steps: int) -> AnyEngine:
        config, role = self._context.config, Role.reward_training
        optimizer = optimizer_settings(config, config.reward, Phase.reward, role, total_steps=steps)
        return build_engine(module, role=role, optimizer=optimizer, **self._shared)


def _further_members(scorer: Scorer, config: RewardConfig, *, seed: int) -> list[Member]:
    if config.members == 1:
        return []
    seeds = [seed_for(seed, "reward_model", number) for number in range(1, config.members)]
    return grow_members(scorer, config, seeds=seeds)


def _pair_weights(config: RewardConfig, num_pairs: int, *, seed: int) -> Tensor:
    """Return the weight (M, N) of each of N pairs in the loss of each further member."""
    weights_MN = torch.ones(config.members - 1, num_pairs)
    if config.reweight_pairs:
        for number, weights_N in enumerate(weights_MN, start=1):
            weights_N.exponential_(generator=random_stream(seed, "reward", "weights", number))
    return weights_MN
