"""Best of n: the choice among n answers, and how far it moves a policy, in nats.

A module, not a command: ``judge_run.py`` and ``papers/best_of_n.py`` use it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def choose_best(scores: Sequence[float], n: int) -> int:
    """Return the place of the best among the first ``n`` scores; of equal ones the first."""
    return max(range(n), key=scores.__getitem__)


def kl_bound(n: int) -> float:
    """Return log n - (n - 1) / n: at most this much KL has best of n, 2401.01879 theorem 3.1."""
    return math.log(n) - (n - 1) / n


def estimate_kl_of_best(probability: float, n: int) -> float:
    """Return the KL of best of n, estimated from one chosen answer, 2401.01879 section 4.

    ``probability`` is that of the chosen answer under the policy that drew it, e:

        (1 - e)^n (log n + (n - 1) log(1 - e) - (n - 1) / n) + b log(b / e),  b = 1 - (1 - e)^n

    It is exact if the best answer has probability e, and all others are infinitely unlikely. It
    is at most ``kl_bound``, which it reaches at e = 0.
    """
    if probability == 0.0:
        return kl_bound(n)
    if probability == 1.0:
        return 0.0
    log_rest = math.log1p(-probability)
    share_of_best = -math.expm1(n * log_rest)
    rest = math.exp(n * log_rest) * (kl_bound(n) + (n - 1) * log_rest)
    return rest + share_of_best * math.log(share_of_best / probability)
