"""Measures of a reward model, or of the members of an ensemble, on held-out pairs.

Shapes: B = pairs, M = members.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from rlhf.algorithms.reward import calibration_bins, calibration_error, end_scores
from rlhf.base.intervals import wilson_interval
from rlhf.base.metrics import Mean, Metrics
from rlhf.base.types import ValueModel
from rlhf.options.ensembles.combined_scores import disagreement
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.supervised import collate_pair_rows


class RewardEvaluation(NamedTuple):
    """Means over held-out pairs; scores of an ensemble are means over its members."""

    means: dict[str, Mean]

    @property
    def accuracy(self) -> Mean:
        """Return the share of pairs whose chosen response scores higher."""
        return self.means["accuracy"]

    @property
    def member_means(self) -> list[float]:
        """Return each member's mean score of the held-out responses."""
        return [mean.value() for name, mean in self.means.items() if name.startswith("mean/")]

    def results(self) -> dict[str, Any]:
        """Return the entries of result.json."""
        accuracy = self.accuracy
        found: dict[str, Any] = {
            "accuracy": accuracy.value(),
            "accuracy_ci": list(wilson_interval(float(accuracy.total), float(accuracy.count))),
        } | self._calibration
        own = [mean.value() for name, mean in self.means.items() if name.startswith("member/")]
        if own:  # of the members of an ensemble
            found["member_accuracies"] = {f"member {n}": x for n, x in enumerate(own, start=1)}
        return found

    def values(self) -> dict[str, float]:
        """Return the metrics to log."""
        shown = {name: mean.value() for name, mean in self.means.items() if "/" not in name}
        return {f"reward/eval_{n}": value for n, value in (shown | self._calibration).items()}

    @property
    def _calibration(self) -> dict[str, float]:
        """Return the calibration error; empty if differences of scores are no probabilities."""
        if "right/0" not in self.means:
            return {}
        return {"calibration_error": calibration_error(self.means)}


def measure_scores(
    chosen_BM: Tensor, rejected_BM: Tensor, keep_B: Tensor, *, is_pairwise: bool
) -> Metrics:
    """Return measures of the members' scores of pairs; the members' own are ``member/NUMBER``.

    If the loss ``is_pairwise``, a difference of scores is a probability, which can be calibrated.
    """
    margin_BM = chosen_BM - rejected_BM
    margin_B = margin_BM.mean(dim=1)
    found: Metrics = {
        "accuracy": Mean.of((margin_B > 0).float(), keep_B),
        "chosen_score": Mean.of(chosen_BM.mean(dim=1), keep_B),
        "rejected_score": Mean.of(rejected_BM.mean(dim=1), keep_B),
        # Half the squared difference of two draws estimates their variance without bias.
        "prompt_variance": Mean.of(margin_B.square() / 2, keep_B),
    }
    if is_pairwise:
        found |= calibration_bins(margin_B, keep_B)
    if margin_BM.shape[1] > 1:
        found["disagreement"] = Mean.of(disagreement(margin_BM), keep_B)
        for number, each_B in enumerate(margin_BM.unbind(1)):
            scores_B = (chosen_BM[:, number] + rejected_BM[:, number]) / 2
            found[f"member/{number}"] = Mean.of((each_B > 0).float(), keep_B)
            found[f"mean/{number}"] = Mean.of(scores_B, keep_B)
    return found


def held_out_margins(
    context: RunContext, model: ValueModel, examples: Any, *, micro: int
) -> list[float]:
    """Return the score of the chosen minus the score of the rejected response, for held-out pairs.

    Every rank computes all pairs.
    """
    total = min(len(examples), context.config.reward.eval_examples)
    margins: list[float] = []
    with model.evaluating():
        for start in range(0, total, micro):
            rows = examples[start : min(start + micro, total)]
            batch = collate_pair_rows(context, rows, max_tokens=context.config.reward.max_tokens)
            chosen_BS, rejected_BS = model(batch.concatenate().ids_BS).chunk(2)
            chosen_B = end_scores(chosen_BS, batch.chosen.attend_BS)
            margins += (chosen_B - end_scores(rejected_BS, batch.rejected.attend_BS)).tolist()
    return margins
