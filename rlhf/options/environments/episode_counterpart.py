"""The other side of episodes: environments that answer the turns of the policy.

Environments read texts, and the policy reads tokens: a turn is decoded once, for the environment,
and an observation is encoded once, for the policy. The text of a turn is never encoded, as that
could give other tokens than the policy sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf.base.errors import RolloutError
from rlhf.base.types import PromptBatch
from rlhf.data.encoding import Encoder
from rlhf.data.plain_turns import render_plain_observation
from rlhf.options.environments.episodes import EpisodeLimits, Outcome
from rlhf.options.environments.interface import (
    EnvironmentPool,
    Observation,
    Reply,
)
from rlhf.options.environments.keys import EnvironmentConfig, FailureName
from rlhf.options.environments.parked_rows import Continuation
from rlhf.options.environments.turns import Utterance
from rlhf.phases.shared.scoring import describe_step
from rlhf.rollout.scheduler import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENVIRONMENT_FAULTS = (
    FailureName.timeout,
    FailureName.exception,
    FailureName.died,
    FailureName.invalid,
)


@dataclass(kw_only=True)
class _Episode(Outcome):
    """An episode in progress: its outcome so far, and the state of its last turn."""

    tokens: int = 0  # number of tokens after the prompt, up to the end of the last turn
    is_cut: bool = False  # the last turn reached its limit before its end token


class Episodes:
    """One batch of episodes with environments; an ``EpisodeCounterpart``.

    Raises:
        RolloutError: if the first observation of an episode is not its prompt; in
            ``continuations``, if faults of environments end more than max_failures episodes.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        pool: EnvironmentPool,
        tokenizer: PreTrainedTokenizerBase,
        encoder: Encoder,
        limits: EpisodeLimits,
        prompts: PromptBatch,
    ) -> None:
        """Begin the episodes of ``prompts``."""
        self._config = config
        self._pool = pool
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._prompts = prompts
        self._limits = limits
        self._faults: Counter[str] = Counter()
        self._failed: dict[int, Reply] = {}  # replies for episodes whose ``reset`` failed
        self._due: list[Reply] = []
        assert prompts.seeds is not None, "prompts of episodes have seeds"
        self._episodes = [_Episode() for _ in prompts.seeds]
        rows = prompts.columns or [{}] * len(prompts.seeds)
        for index, (seed, row) in enumerate(zip(prompts.seeds, rows, strict=True)):
            pool.reset(index, seed=seed, row=row)
        for _ in self._episodes:
            self._due = self._due or pool.replies(wait=True)
            self._check_first_observation(self._due.pop())

    def submit_turn(self, request: Request) -> None:
        """Decode the turn that has just ended, and send it to the environment."""
        episode, index = self._episodes[request.index], request.index
        ids = request.ids[request.turn_starts[-1] :]
        text = self._tokenizer.decode(ids, skip_special_tokens=True).strip()
        episode.messages.append(Utterance("assistant", text))
        episode.tokens, episode.is_cut = len(request.ids), not request.has_ended
        if index in self._failed:
            self._due.append(self._failed[index])
        else:
            self._pool.step(index, text)

    def continuations(self, *, wait: bool) -> list[Continuation]:
        """Return new continuations: the ids of an episode's next observation, or its end."""
        replies, self._due = self._due or self._pool.replies(wait=wait), []
        answers = [(reply.episode, self._add_reply(reply)) for reply in replies]
        open_ones = [(index, answer) for index, answer in answers if answer is not None]
        ids = self._encoder.encode_observations(
            [(answer.role, answer.text) for _, answer in open_ones]
        )
        over = [Continuation(index, None) for index, answer in answers if answer is None]
        return over + [
            self._continue_episode(index, added)
            for (index, _), added in zip(open_ones, ids, strict=True)
        ]

    def outcomes(self) -> Sequence[Outcome]:
        """Return the outcome of each episode."""
        return self._episodes

    def _check_first_observation(self, reply: Reply) -> None:
        """Check that an episode begins with its prompt, or store the reply if ``reset`` failed."""
        if reply.failure is not None:
            self._failed[reply.episode] = reply
            return
        first, expected = reply.observation, self._prompts.texts[reply.episode]
        if not expected.endswith(render_plain_observation(first.role, first.text)):
            raise RolloutError(
                f"environment.kind={self._config.kind}: with the same seed and row, reset returned "
                f"{first.text[:80]!r} now and {expected[-80:]!r} when the data was made; take all "
                "randomness from the seed"
            )

    def _add_reply(self, reply: Reply) -> Observation | None:
        """Add a reply to its episode; return the next observation, None if the episode is over."""
        episode, step = self._episodes[reply.episode], reply.step
        found = [FailureName.cut_turn] if episode.is_cut else []
        found += [FailureName.malformed] if step.info.get("malformed") else []
        found += [] if reply.failure is None else [reply.failure]
        episode.failures += found
        episode.rewards.append(step.reward + sum(self._failure_reward(name) for name in found))
        if "success" in step.info:
            episode.success = float(step.info["success"])
        if reply.failure in ENVIRONMENT_FAULTS:
            self._count_fault(reply)
            return None
        episode.ended = step.terminated
        at_limit = len(episode.rewards) == self._config.max_turns
        episode.truncated = not step.terminated and (step.truncated or at_limit)
        if episode.ended or episode.truncated:
            return None
        observation = reply.observation
        episode.messages.append(Utterance(observation.role, observation.text))
        return observation

    def _continue_episode(self, index: int, added: list[int]) -> Continuation:
        """Return a continuation with the ids ``added``, or the episode's end if they do not fit."""
        episode = self._episodes[index]
        if episode.is_cut:
            added = [self._encoder.end_id, *added]  # the policy did not write the turn's end token
        begin = episode.tokens + len(added)
        if begin >= self._limits.episode:
            episode.failures.append(FailureName.too_long)
            episode.rewards[-1] += self._failure_reward(FailureName.too_long)
            episode.truncated = True
            episode.messages.pop()  # the policy does not read an observation that does not fit
            return Continuation(index, None)
        return Continuation(
            index,
            added,
            limit=min(begin + self._limits.turn, self._limits.episode),
            first_draw=len(episode.rewards) * self._limits.turn,
        )

    def _failure_reward(self, failure: FailureName) -> float:
        price: float = getattr(self._config.failure_rewards, failure.value)
        return price

    def _count_fault(self, reply: Reply) -> None:
        """Count a fault of an environment; raise RolloutError if there are too many."""
        self._faults[str(reply.failure)] += 1
        if self._faults.total() > self._config.max_failures:
            counts = ", ".join(f"{count} {name}" for name, count in self._faults.items())
            raise RolloutError(
                f"environment.kind={self._config.kind} failed {describe_step(self._prompts)} in "
                f"{self._faults.total()} episodes ({counts}), more than environment.max_failures="
                f"{self._config.max_failures}; the last one: {reply.problem}"
            )
