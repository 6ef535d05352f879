"""Train the first member of an ensemble, and then all further members at the same time.

Shapes: B = pairs, S = tokens of whole sequences, M = members, N = all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from rlhf.base.metrics import Mean, Metrics
from rlhf.base.random_streams import random_stream, seed_for
from rlhf.config.choices import Phase, RewardLossName
from rlhf.data.collate import PairStep
from rlhf.engine.select import AnyEngine
from rlhf.phases.reward import RewardTrainer, plan_pair_steps
from rlhf.phases.reward_evaluation import RewardEvaluation
from rlhf.phases.shared.context import RunContext
from rlhf_lab.ensembles import CombineName, EnsembleKeys
from rlhf_lab.ensembles.combined_scores import disagreement
from rlhf_lab.ensembles.members import (
    build_members,
    copy_weights_of_first_member,
    record_top_block_calls,
    save_members,
    swap_in_mean_weights,
)

if TYPE_CHECKING:
    from datasets import Dataset


class EnsembleTrainer(RewardTrainer):
    """A trainer of an ensemble, whose first member learns like a single reward model.

    After ``start_members`` the first member is frozen, and the further members learn from hidden
    states of its lower blocks, computed once for all of them. Each further member has its own
    engine, which clips its gradient and updates it as if the member were trained alone.
    """

    def __init__(self, context: RunContext, steps: Sequence[PairStep], pairs: Dataset) -> None:
        super().__init__(context, steps)
        config, seed = EnsembleKeys.of(context.config), context.config.seed
        further = plan_pair_steps(context, pairs, config.member_epochs, "members", "shuffle")
        self.steps = [*steps, *further]
        self._first_steps, self._member_steps = len(steps), len(further)
        seeds = [seed_for(seed, "reward_model", number) for number in range(1, config.members)]
        self._waiting = build_members(self.scorer, config, seeds=seeds)
        self._pair_weights_MN = _draw_pair_weights(config, len(pairs), seed=seed)
        resumed = context.resumes.get(Phase.reward)
        if resumed is not None and resumed.step > self._first_steps:
            self.start_members()

    @classmethod
    def build(cls, context: RunContext, steps: list[PairStep], pairs: Dataset) -> Self:
        """Build the trainer, which trains the first member in ``steps``, then further members."""
        return cls(context, steps, pairs)

    def start_members(self) -> None:
        """Build the engines of the further members; from now on the first member is frozen."""
        if self._is_warm:
            for member in self._waiting:  # members that will be averaged must start equal
                copy_weights_of_first_member(self.scorer, member)
        for number, member in enumerate(self._waiting, start=1):
            self.engines[f"member_{number}"] = self.build_engine(member, self._member_steps)

    @property
    def members(self) -> list[nn.Module]:
        """Return the further members; [] before ``start_members`` is called."""
        return [engine.module for name, engine in self.engines.items() if name != "model"]

    @property
    def is_averaged(self) -> bool:
        """Return True if the mean of the members' weights is the reward model (WARM)."""
        return self._is_warm and bool(self.members)

    def prepare_learners(self, step: int) -> list[AnyEngine]:
        """Start further members after the first member's last step; return the engines to train."""
        if step > self._first_steps and not self.members:
            self.start_members()
        first, *further = self.engines.values()
        return further or [first]

    def pair_weights_per_learner(self, pairs: Sequence[int], weights: Sequence[float]) -> Tensor:
        """Return the weights (M, B) of ``pairs`` in the loss of each member that learns now."""
        weights_1B = super().pair_weights_per_learner(pairs, weights)
        return weights_1B * self._pair_weights_MN[:, list(pairs)] if self.members else weights_1B

    def token_values(self, ids_BS: Tensor, *, trains: bool = False) -> Iterator[Tensor]:
        """Yield values (B, S) of all members; if ``trains``, only of the members that learn now.

        An evaluation with WARM yields only values of the first engine, which has the mean weights.
        """
        first, *further = self.engines.values()
        if not further or (self.is_averaged and not trains):
            yield first(ids_BS)
            return
        with first.evaluating(), record_top_block_calls(self.scorer, self.members) as calls:
            values_of_first_BS = first(ids_BS)
        if not trains:
            yield values_of_first_BS
        for engine in further:
            yield engine(calls)

    def measure_scores(self, chosen_BM: Tensor, rejected_BM: Tensor, keep_B: Tensor) -> Metrics:
        """Return the usual metrics, the disagreement, and each member's accuracy and mean score."""
        metrics = super().measure_scores(chosen_BM, rejected_BM, keep_B)
        margin_BM = chosen_BM - rejected_BM
        if margin_BM.shape[1] == 1:
            return metrics
        metrics["disagreement"] = Mean.of(disagreement(margin_BM), keep_B)
        for number, margin_B in enumerate(margin_BM.unbind(1)):
            scores_B = (chosen_BM[:, number] + rejected_BM[:, number]) / 2
            metrics[f"member/{number}"] = Mean.of((margin_B > 0).float(), keep_B)
            metrics[f"mean/{number}"] = Mean.of(scores_B, keep_B)
        return metrics

    def swap_in_final_weights(self) -> AbstractContextManager[None]:
        """Within the context, replace the model's weights by the members' mean if WARM is used."""
        return (
            swap_in_mean_weights(self.scorer, self.members) if self.is_averaged else nullcontext()
        )

    def results(self, after: RewardEvaluation) -> dict[str, Any]:
        """Return the usual results and the accuracy of each member."""
        accuracies = _read_member_means("member/", after)
        by_member = {f"member {number}": x for number, x in enumerate(accuracies, start=1)}
        return super().results(after) | ({"member_accuracies": by_member} if by_member else {})

    def build_extra_writer(self, after: RewardEvaluation) -> Callable[[Path], None] | None:
        """Return a function that saves the further members; None if only one model is saved."""
        if self.is_averaged or not self.members:
            return None
        # Regression determines the zero of scores; a pairwise loss leaves each member its own zero.
        has_zero = self.context.config.reward.loss is RewardLossName.regression
        offsets_M = torch.tensor(
            [0.0 if has_zero else mean for mean in _read_member_means("mean/", after)]
        )
        return partial(save_members, members=self.members, offsets_M=offsets_M)

    @property
    def _is_warm(self) -> bool:
        return EnsembleKeys.of(self.context.config).combine is CombineName.warm


def _read_member_means(prefix: str, after: RewardEvaluation) -> list[float]:
    """Return the means of the metrics whose names begin with ``prefix``: one for each member."""
    return [mean.value() for name, mean in after.means.items() if name.startswith(prefix)]


def _draw_pair_weights(config: EnsembleKeys, num_pairs: int, *, seed: int) -> Tensor:
    """Draw the weight (M, N) of each of N pairs in the loss of each further member."""
    weights_MN = torch.ones(config.members - 1, num_pairs)
    if config.reweight_pairs:
        for number, weights_N in enumerate(weights_MN, start=1):
            weights_N.exponential_(generator=random_stream(seed, "reward", "weights", number))
    return weights_MN
