"""DAPO's dynamic sampling: replace prompts whose responses all have the same score.

https://arxiv.org/abs/2503.14476. Each round replaces all such prompts and samples new responses.
Use it with an estimator that compares the responses to a prompt, if many prompts teach nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import Phase
from rlhf.config.schema.keys import ANSWERING_PHASES, AT_LEAST_0, key
from rlhf.config.schema.ppo import COMPARING
from rlhf.methods import Method, MethodKeys

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig
    from rlhf_lab.resampling.hooks import ResamplingHook


@dataclass(kw_only=True)
class ResamplingKeys(MethodKeys):
    """Keys of the group ``ppo`` for DAPO's dynamic sampling."""

    resampling_rounds: int = key(AT_LEAST_0, default=0)
    """DAPO's dynamic sampling: how often a prompt whose responses all have the same score is
    replaced by another one; 0: never."""


class Resampling(Method):
    """Replace prompts whose responses all have the same score."""

    name = "resampling"
    keys = {"ppo": ResamplingKeys}
    off = {"ppo.resampling_rounds": 0}

    def check(self, config: RunConfig) -> None:
        """Check that the estimator compares responses, and that no lag or environment is set."""
        rounds = ResamplingKeys.of(config).resampling_rounds
        phases, estimator = {*config.phase.order}, config.ppo.advantage_estimator
        lag, kind = config.rollout.lag, config.environment.kind
        answers = bool(ANSWERING_PHASES(config) & phases)
        *others, last = COMPARING
        broken = {
            f"environment.kind={kind} with ppo.resampling_rounds={rounds}: resampling does not "
            "replace episodes; set ppo.resampling_rounds=0": config.environment.is_used,
            f"ppo.resampling_rounds={rounds} with rollout.lag={lag}: prompts are replaced after "
            "their responses are scored, but with a lag the next steps are already sampled by "
            "then; use rollout.lag=0, or ppo.resampling_rounds=0": lag > 0 and answers,
            f"ppo.resampling_rounds={rounds}: {estimator} also learns from responses with equal "
            "scores; set ppo.resampling_rounds=0, or use "
            f"ppo.advantage_estimator={', '.join(others)} or {last}": (
                Phase.ppo in phases and estimator not in COMPARING
            ),
        }
        if rounds > 0:
            refuse_broken_rule(broken)

    def hook(self) -> type[ResamplingHook]:
        """Return the class of the hook that replaces prompts before a step learns from them."""
        from rlhf_lab.resampling.hooks import ResamplingHook

        return ResamplingHook
