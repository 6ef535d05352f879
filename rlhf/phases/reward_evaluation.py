"""Measures of a reward model on held-out pairs or graded responses.

Shapes: B = pairs, M = scores per response (1, unless an option trains several models).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from rlhf.algorithms.ranking import Ranking
from rlhf.algorithms.reward import calibration_bins, calibration_error, end_scores
from rlhf.base.intervals import wilson_interval
from rlhf.base.metrics import Mean, Metrics
from rlhf.base.types import ValueModel
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.supervised import collate_pair_rows


class RewardEvaluation(NamedTuple):
    """Measures of a reward model, as means over held-out pairs or graded responses.

    If a response has several scores, the measures use their mean.
    """

    means: dict[str, Mean]
    ranking: Ranking | None = None
    """The accuracy on graded responses and its interval; None: the measures are of pairs."""

    @property
    def accuracy(self) -> Mean:
        """Return the share of pairs whose chosen response scores above the rejected one."""
        return self.means["accuracy"]

    def results(self) -> dict[str, Any]:
        """Return the entries of result.json."""
        if self.ranking is not None:
            return self.ranking.results()
        accuracy = self.accuracy
        return {
            "accuracy": accuracy.value(),
            "accuracy_ci": list(wilson_interval(float(accuracy.total), float(accuracy.count))),
        } | self._calibration_metrics

    def metrics(self) -> dict[str, float]:
        """Return the metrics to log."""
        shown = {name: mean.value() for name, mean in self.means.items() if "/" not in name}
        if self.ranking is not None:
            shown["accuracy"] = self.ranking.accuracy
        return {f"reward/eval_{n}": each for n, each in (shown | self._calibration_metrics).items()}

    @property
    def _calibration_metrics(self) -> dict[str, float]:
        """Return the calibration error; {} if the loss is not pairwise and gives no probability."""
        if "right/0" not in self.means:
            return {}
        return {"calibration_error": calibration_error(self.means)}


def measure_scores(
    chosen_BM: Tensor, rejected_BM: Tensor, keep_B: Tensor, *, is_pairwise: bool
) -> Metrics:
    """Return measures of the scores of pairs.

    If the loss ``is_pairwise``, the sigmoid of a score difference is a probability. Its calibration
    is then measured too.
    """
    margin_B = (chosen_BM - rejected_BM).mean(dim=1)
    measures: Metrics = {
        "accuracy": Mean.of((margin_B > 0).float(), keep_B),
        "chosen_score": Mean.of(chosen_BM.mean(dim=1), keep_B),
        "rejected_score": Mean.of(rejected_BM.mean(dim=1), keep_B),
        # Half the squared difference of two scores is an unbiased estimate of their variance.
        "prompt_variance": Mean.of(margin_B.square() / 2, keep_B),
    }
    if is_pairwise:
        measures |= calibration_bins(margin_B, keep_B)
    return measures


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
