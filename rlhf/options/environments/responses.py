"""Responses that are episodes: connect them to environments, measure them, and show their texts.

Environments read text, and the policy reads tokens: each turn is decoded once, for the environment,
and each observation is encoded once, for the policy. The text of a turn is never encoded again, as
that could give tokens that differ from those that the policy sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.base.errors import RolloutError
from rlhf.base.ranks import Ranks
from rlhf.base.types import PromptBatch, Responses, Rollout, RolloutBackend, Shown
from rlhf.config.schema.run import RunConfig
from rlhf.data.encoding import Encoder
from rlhf.data.plain_turns import render_plain_observation
from rlhf.data.records import Record
from rlhf.options.environments.episodes import EpisodeLimits, EpisodeRollout, Outcome
from rlhf.options.environments.interface import (
    EnvironmentPool,
    EpisodeStart,
    Observation,
    Player,
    Reply,
    play_episodes,
)
from rlhf.options.environments.keys import EnvironmentConfig, FailureName
from rlhf.options.environments.parked_rows import Continuation
from rlhf.options.environments.process_pool import build_pool
from rlhf.options.environments.turns import Utterance, turns_of
from rlhf.phases.shared.scoring import describe_step
from rlhf.rollout.scheduler import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUP, FAILURES = "episode/", "failures/"  # of the names of measures
ENVIRONMENT_FAULTS = (
    FailureName.timeout,
    FailureName.exception,
    FailureName.died,
    FailureName.invalid,
)


class EnvironmentPartner:
    """A ``Partner`` that answers the policy's turns with a pool of environments."""

    def __init__(self, config: RunConfig, pool: EnvironmentPool) -> None:
        self._config = config
        self._pool = pool

    def wrap_backend(
        self, backend: RolloutBackend, tokenizer: PreTrainedTokenizerBase, ranks: Ranks
    ) -> RolloutBackend:
        """Return a backend whose responses are episodes; ``backend`` samples their turns."""
        config = self._config
        limits = EpisodeLimits(config.rollout.max_response_tokens, config.environment.max_tokens)
        encoder = Encoder(tokenizer, config.data.template)
        # Raise now, before any rollout, if the template cannot render an observation.
        encoder.encode_observations([("user", "")])
        begin = partial(Episodes, config.environment, self._pool, tokenizer, encoder, limits)
        pad_id = tokenizer.pad_token_id
        return EpisodeRollout(backend, begin, limits, pad_id=pad_id, ranks=ranks)

    def comparison_values(self, records: Sequence[Record]) -> dict[str, float]:
        """Return the largest expected return, and the mean return of random turns, if known."""
        facts, values = self._pool.facts, {}
        if facts.optimum is not None:
            values["optimum"] = facts.optimum
        if Player.random in facts.players:
            starts = [EpisodeStart(r.seed, r.columns or {}) for r in records if r.seed is not None]
            most = self._config.environment.max_turns
            played = play_episodes(self._pool, starts, player=Player.random, max_turns=most)
            values["random_return"] = sum(each.total_reward for each in played) / len(played)
        return values

    def close(self) -> None:
        """End the processes of the environments."""
        self._pool.close()


def open_partner(config: RunConfig) -> EnvironmentPartner:
    """Return the partner of this rank; the processes of its environments have started."""
    return EnvironmentPartner(config, build_pool(config.environment))


def episode_token_rewards(responses: Responses) -> Tensor:
    """Return the rewards (B, T) of turns, at the last tokens of the turns."""
    turns = turns_of(responses)
    assert turns is not None, "kind=environment without episodes"
    return turns.rewards_BT


def measure_responses(responses: Responses) -> dict[str, Tensor]:
    """Return measures (B,) of episodes; {} for responses that are not episodes.

    ``episode/failures/NAME`` is the number of failures of the kind NAME in each episode.
    """
    turns = turns_of(responses)
    if turns is None:
        return {}
    counts = {
        f"{FAILURES}{name}": [row.count(name) for row in turns.failures] for name in FailureName
    }
    values = {
        "return": turns.rewards_BT.sum(dim=1),
        "success": turns.success_B,
        "turns": turns.turn_BT.amax(dim=1) + 1,
        "truncated": turns.truncated_B,
        "observation_tokens": (turns.attend_BT & ~responses.keep_BT).sum(dim=1),
    }
    device = turns.success_B.device
    values |= {name: torch.tensor(each, device=device) for name, each in counts.items()}
    return {f"{GROUP}{name}": values_B.float() for name, values_B in values.items()}


def texts_to_show(rollout: Rollout, texts: Sequence[str]) -> list[Shown]:
    """Return the prompt, turns and observations of each row.

    The text of a prompt begins with the episode's seed, since first observations may be equal.
    """
    prompts, turns = rollout.prompts, turns_of(rollout.responses)
    if turns is None or prompts.seeds is None:
        return [Shown(*each) for each in zip(prompts.texts, texts, strict=True)]
    return [
        Shown(f"[episode {seed}]{text}", join_messages(messages), [m._asdict() for m in messages])
        for seed, text, messages in zip(prompts.seeds, prompts.texts, turns.messages, strict=True)
    ]


def join_messages(messages: Sequence[Utterance]) -> str:
    """Return an episode's turns as one text, with observations in brackets."""
    return " ".join(text if role == "assistant" else f"[{role}: {text}]" for role, text in messages)


def evaluation_results(by_prompt: Mapping[str, list[float]], when: str) -> dict[str, Any]:
    """Return means and failures of episodes as entries of result.json; {} without episodes."""
    values = {n.removeprefix(GROUP): v for n, v in by_prompt.items() if n.startswith(GROUP)}
    if not values:
        return {}
    means = {name: sum(each) / len(each) for name, each in values.items()}
    return {
        **{f"{name}_{when}": means[name] for name in ("return", "success", "turns", "truncated")},
        f"failures_{when}": {
            name.removeprefix(FAILURES): int(sum(each))
            for name, each in values.items()
            if name.startswith(FAILURES) and any(each)
        },
    }


@dataclass(kw_only=True)
class _Episode(Outcome):
    """An episode in progress: its outcome so far, and the state of its last turn."""

    tokens: int = 0  # number of tokens after the prompt, up to the end of the last turn
    is_cut: bool = False  # the last turn reached its limit before its end token


@dataclass
class Episodes:
    """One batch of episodes with environments; an ``EpisodeCounterpart``.

    Raises:
        RolloutError: if the first observation of an episode is not its prompt; in
            ``continuations``, if faults of environments end more than max_failures episodes.
    """

    config: EnvironmentConfig
    pool: EnvironmentPool
    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    limits: EpisodeLimits
    prompts: PromptBatch
    _faults: Counter[str] = field(default_factory=Counter, init=False)
    # Replies for episodes whose ``reset`` failed.
    _failed: dict[int, Reply] = field(default_factory=dict, init=False)
    _due: list[Reply] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        seeds = self.prompts.seeds
        assert seeds is not None, "episode prompts must have seeds"
        self._episodes = [_Episode() for _ in seeds]
        rows = self.prompts.columns or [{}] * len(seeds)
        for index, (seed, row) in enumerate(zip(seeds, rows, strict=True)):
            self.pool.reset(index, seed=seed, row=row)
        for _ in self._episodes:
            self._due = self._due or self.pool.replies(wait=True)
            self._check_first_observation(self._due.pop())

    def submit_turn(self, request: Request) -> None:
        """Decode the turn that has just ended, and send it to the environment."""
        episode, index = self._episodes[request.index], request.index
        ids = request.ids[request.turn_starts[-1] :]
        text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
        episode.messages.append(Utterance("assistant", text))
        episode.tokens, episode.is_cut = len(request.ids), not request.has_ended
        if index in self._failed:
            self._due.append(self._failed[index])
        else:
            self.pool.step(index, text)

    def continuations(self, *, wait: bool) -> list[Continuation]:
        """Return new continuations: the ids of an episode's next observation, or its end."""
        replies, self._due = self._due or self.pool.replies(wait=wait), []
        answers = [(reply.episode, self._add_reply(reply)) for reply in replies]
        open_ones = [(index, answer) for index, answer in answers if answer is not None]
        ids = self.encoder.encode_observations(
            [(answer.role, answer.text) for _, answer in open_ones]
        )
        ended = [Continuation(index, None) for index, answer in answers if answer is None]
        return ended + [
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
        first, expected = reply.observation, self.prompts.texts[reply.episode]
        if not expected.endswith(render_plain_observation(first.role, first.text)):
            raise RolloutError(
                f"environment.kind={self.config.kind}: with the same seed and row, reset returned "
                f"{first.text[:80]!r} now and {expected[-80:]!r} when the data was made; take all "
                "randomness from the seed"
            )

    def _add_reply(self, reply: Reply) -> Observation | None:
        """Add a reply to its episode; return the next observation, None if the episode is over."""
        episode, step = self._episodes[reply.episode], reply.step
        failures = [FailureName.cut_turn] if episode.is_cut else []
        failures += [FailureName.malformed] if step.info.get("malformed") else []
        failures += [] if reply.failure is None else [reply.failure]
        episode.failures += failures
        episode.rewards.append(step.reward + sum(self._failure_reward(name) for name in failures))
        if "success" in step.info:
            episode.success = float(step.info["success"])
        if reply.failure in ENVIRONMENT_FAULTS:
            self._count_fault(reply)
            return None
        episode.ended = step.terminated
        at_limit = len(episode.rewards) == self.config.max_turns
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
            added = [self.encoder.end_id, *added]  # the policy did not write the turn's end token
        begin = episode.tokens + len(added)
        if begin >= self.limits.episode:
            episode.failures.append(FailureName.too_long)
            episode.rewards[-1] += self._failure_reward(FailureName.too_long)
            episode.truncated = True
            episode.messages.pop()  # the policy does not read an observation that does not fit
            return Continuation(index, None)
        return Continuation(
            index,
            added,
            limit=min(begin + self.limits.turn, self.limits.episode),
            first_draw=len(episode.rewards) * self.limits.turn,
        )

    def _failure_reward(self, failure: FailureName) -> float:
        reward: float = getattr(self.config.failure_rewards, failure.value)
        return reward

    def _count_fault(self, reply: Reply) -> None:
        """Count a fault of an environment; raise RolloutError if there are too many."""
        self._faults[str(reply.failure)] += 1
        if self._faults.total() > self.config.max_failures:
            counts = ", ".join(f"{count} {name}" for name, count in self._faults.items())
            raise RolloutError(
                f"environment.kind={self.config.kind} failed {describe_step(self.prompts)} in "
                f"{self._faults.total()} episodes ({counts}), more than environment.max_failures="
                f"{self.config.max_failures}; the last one: {reply.problem}"
            )
