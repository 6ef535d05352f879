"""Corrupt a score on purpose, so that the step at which reward hacking can begin is known.

A part with kind=bias adds ``weight`` times a bias to the sum of the other rewards from PPO step
``onset`` on, as CHERRL (https://arxiv.org/abs/2606.04923) adds a bias to a judge's score. Use it to
test what detects hacking, never to train a model for use: the score does not measure quality.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.schema.keys import AT_LEAST_0, key
from rlhf.methods import Method, MethodKeys

if TYPE_CHECKING:
    from rlhf.config.schema.rewards import RewardTerm
    from rlhf.config.schema.run import RunConfig
    from rlhf_lab.biases.bias_report import BiasReport
    from rlhf_lab.biases.bias_scores import BiasScorer
    from rlhf_lab.biases.hooks import BiasHook

KIND = "bias"
RewardBias = StrEnum("RewardBias", "length token sycophancy position format")
"""Names of the biases; ``bias_scores.py`` defines the score of each bias."""


@dataclass(kw_only=True)
class BiasKeys(MethodKeys):
    """Keys of a part of ``rewards`` that corrupts the score."""

    bias: RewardBias | None = None
    """kind=bias: what corrupts the score: length, token, sycophancy, position or format."""
    onset: int = key(AT_LEAST_0, default=0)
    """kind=bias: first PPO step whose responses the bias scores; 0: from the start."""


class Biases(Method):
    """Corrupt the score on purpose, to study reward hacking; the model is good for nothing else."""

    name = "biases"
    keys = {"rewards": BiasKeys}
    reward_kinds = {KIND: ("kind", "weight", "timeout_seconds", "bias*", "pattern", "onset")}

    def check(self, config: RunConfig) -> None:
        """Raise ConfigError if a bias has values that exclude each other, or corrupts nothing."""
        biases, steps = find_biases(config), config.ppo.steps
        for name, part in biases.items():
            keys = BiasKeys.of(part)
            broken = {
                f"pattern={part.pattern}: bias=token needs it, and no other bias reads it": (
                    (keys.bias is RewardBias.token) == (part.pattern is None)
                ),
                "weight=0: a bias of this strength corrupts nothing; give it another weight, or "
                "remove the part": part.weight == 0,
                f"onset={keys.onset}: above ppo.steps={steps}, so that no step is corrupted; use "
                "an earlier onset, or more steps": steps is not None and keys.onset > steps,
            }
            refuse_broken_rule(broken, f"rewards.{name}.")
        is_alone = {
            "rewards with kind=bias alone: there is no reward that the bias could corrupt; add "
            "rewards.model={kind: model}, or another part": 0 < len(biases) == len(config.rewards),
        }
        refuse_broken_rule(is_alone)

    def warnings(self, config: RunConfig) -> Iterator[str]:
        """Yield a warning for each part that corrupts the score."""
        for name, part in find_biases(config).items():
            onset = BiasKeys.of(part).onset
            yield f"rewards.{name} (kind=bias) corrupts the score on purpose from step {onset} on"

    def hook(self) -> type[BiasHook]:
        """Return the class of the hook that stores the onsets."""
        from rlhf_lab.biases.hooks import BiasHook

        return BiasHook

    def scorer(self) -> BiasScorer:
        """Return the scorer that computes the biases."""
        from rlhf_lab.biases.bias_scores import BiasScorer

        return BiasScorer()

    def report(self) -> BiasReport:
        """Return the part of the report which warns that the score was corrupted."""
        from rlhf_lab.biases.bias_report import BiasReport

        return BiasReport()


def find_biases(config: RunConfig) -> dict[str, RewardTerm]:
    """Return the parts that corrupt the score, by name."""
    return {name: part for name, part in config.rewards.items() if part.kind == KIND}
