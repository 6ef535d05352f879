"""Rules of the parts of ``rewards`` with kind=bias, and the warning that they corrupt the score."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardTerm
from rlhf.config.schema.run import RunConfig
from rlhf.options.biases.keys import RewardBias


def check(config: RunConfig) -> None:
    """Raise ConfigError if a bias has values that exclude each other, or nothing to corrupt."""
    biases, steps = find_biases(config), config.ppo.steps
    for name, part in biases.items():
        broken = {
            f"pattern={part.pattern}: bias=token needs it, and no other bias reads it": (
                (part.bias is RewardBias.token) == (part.pattern is None)
            ),
            "weight=0: a bias of this strength corrupts nothing; give it another weight, or "
            "remove the part": part.weight == 0,
            f"onset={part.onset}: above ppo.steps={steps}, so that no step is corrupted; use an "
            "earlier onset, or more steps": steps is not None and part.onset > steps,
        }
        refuse_broken_rule(broken, f"rewards.{name}.")
    is_alone = {
        "rewards with kind=bias alone: there is no reward that the bias could corrupt; add "
        "rewards.model={kind: model}, or another part": 0 < len(biases) == len(config.rewards),
    }
    refuse_broken_rule(is_alone)


def reward_warnings(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each part that corrupts the score."""
    for name, part in find_biases(config).items():
        yield f"rewards.{name} (kind=bias) corrupts the score on purpose from step {part.onset} on"


def find_biases(config: RunConfig) -> dict[str, RewardTerm]:
    """Return the parts that corrupt the score, by name."""
    return {name: part for name, part in config.rewards.items() if part.kind is RewardKind.bias}
