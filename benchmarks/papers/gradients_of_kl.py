"""Which gradient is right, with a bias of the KL judged by the KL alone: a second criterion.

The first one, of ``gradients``, asks that k3 in the loss biases the whole objective by more than
1 %. But the weight of the KL decides that, and says nothing of the estimator.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from papers.gradients import RESULT as FIRST
from papers.gradients import judge

OF_KL = ("k3, reward", "k3, loss", "k3_ratio, loss")

RESULT = replace(
    FIRST,
    title="Which gradient is right, the KL by itself",
    criterion="on tasks that *Which gradient is right* has not seen. Passed: what it asks, but that"
    f" in the rows {'; '.join(OF_KL)} the gradient of the KL alone has the bias of more than 1 %,"
    " and not that of the whole objective, of which kl_ctl decides how much the KL is. Failed:"
    " otherwise.",
    note="",
    seeds=(6, 7, 8, 9, 10),
    judge=partial(judge, of_kl=OF_KL),
)
