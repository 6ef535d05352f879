"""Keys of the group ``environment``, and the time step of PPO's advantages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlhf.config.choices import Phase
from rlhf.config.schema.keys import (
    ABOVE_0,
    AT_LEAST_0,
    NO_PHASE,
    SCORE,
    SECONDS,
    always_affects,
    key,
    needs,
)

SUCCESS = "episode/success"  # the measure that is 1 if an episode is a success
PROMPT_MARK = r"^\[episode \d+\]"  # the text before the prompt of an episode in samples.jsonl


EnvironmentKind = StrEnum(
    "EnvironmentKind",
    "none number_guessing calculator blackjack gymnasium textarena reasoning_gym gem tools custom",
)
"""Kinds of environments; none: responses are single turns."""


class FailureName(StrEnum):
    """Failures of an episode: first four faults of the environment, then three of the policy."""

    timeout = "timeout"  # a step took longer than environment.step_seconds
    exception = "exception"  # the environment raised an error
    died = "died"  # the environment's process ended
    invalid = "invalid"  # the environment returned no valid step, or a replay went differently
    malformed = "malformed"  # the policy's turn could not be read; the episode continues
    cut_turn = "cut_turn"  # the policy's turn reached its token limit; the episode continues
    too_long = "too_long"  # the next observation exceeds environment.max_tokens: the episode is cut


GaeUnit = StrEnum("GaeUnit", "token turn")
"""Units of a time step in generalised advantage estimation."""

EPISODES = needs("environment.kind", fix="choose one with environment=NAME")


@dataclass(kw_only=True)
class FailureRewards:
    """Rewards for failures, each added to the environment's reward of the turn with the failure."""

    timeout: float = key(SCORE)
    """A step took longer than step_seconds; the episode ends."""
    exception: float = key(SCORE)
    """The environment raised an error; the episode ends."""
    died: float = key(SCORE)
    """The environment's process ended; the episode ends."""
    invalid: float = key(SCORE)
    """The environment returned no valid step; the episode ends."""
    malformed: float = key(SCORE)
    """The environment could not read the turn, such as a tool call that is not JSON."""
    cut_turn: float = key(SCORE)
    """The turn reached rollout.max_response_tokens before its end."""
    too_long: float = key(SCORE)
    """The next observation does not fit into max_tokens; the episode is cut."""


@dataclass(kw_only=True)
class EnvironmentConfig:
    """Settings of the environment that the policy talks to in turns (docs/environments.md)."""

    kind: EnvironmentKind = key(unread=())
    """none, a built-in one, an adapter to a package, tools, or custom."""
    id: str | None
    """Name of the environment in its package, for gymnasium, textarena, reasoning_gym and gem."""
    target: str | None
    """MODULE:CLASS for kind=tools and kind=custom."""
    run_code: bool
    """kind=tools and kind=custom: agree to run this class's code; with kind=gymnasium, that of the
    module in id=MODULE:NAME, which gymnasium imports."""
    options: dict[str, Any]
    """Keyword arguments of the environment."""
    max_turns: int = key(ABOVE_0)
    """Turns of the policy in an episode; after them the episode is cut."""
    max_tokens: int = key(ABOVE_0)
    """Tokens of an episode after its prompt, those of observations included."""
    step_seconds: float = key(SECONDS)
    """Seconds in which an environment must answer; otherwise its process is ended."""
    processes: int = key(AT_LEAST_0, affects=NO_PHASE)
    """Processes per rank that run environments; 0: the rank runs built-in ones itself."""
    max_failures: int = key(AT_LEAST_0, affects=NO_PHASE)
    """Maximum number of faults of a rank's environments in one step; with more the run ends."""
    failure_rewards: FailureRewards
    """Reward of the turn in which a failure happens, on top of the environment's own reward."""

    @property
    def is_used(self) -> bool:
        """Return True if responses are episodes of several turns."""
        return self.kind is not EnvironmentKind.none

    @property
    def turn_limit(self) -> int:
        """Return the maximum number of turns of a response: 1 without an environment."""
        return self.max_turns if self.is_used else 1


@dataclass(kw_only=True)
class EnvironmentGroup:
    """The group ``environment`` of a run."""

    environment: EnvironmentConfig = key(
        affects=always_affects(Phase.sft, Phase.ppo, Phase.dpo),
        is_inherited=True,
        unread=[EPISODES],
    )


@dataclass(kw_only=True)
class TurnKeys:
    """Keys of the group ``ppo`` for the advantages of episodes."""

    gae_unit: GaeUnit = key(unread=[EPISODES])
    """Time step of gamma and lam: token, or turn of an episode with an environment."""
