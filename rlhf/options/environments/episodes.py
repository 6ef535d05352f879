"""A rollout backend whose responses are episodes: conversations with a counterpart.

Shapes: B = episodes, T = tokens after the prompt, of turns and observations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch

from rlhf.base.ranks import Ranks
from rlhf.base.types import (
    Engine,
    PromptBatch,
    Responses,
    RolloutBackend,
    copy_to_device,
    pad_rows,
)
from rlhf.options.environments.parked_rows import Counterpart, ParkedRows
from rlhf.options.environments.turns import NO_TURN, Turns, Utterance
from rlhf.rollout.fast import FastRollout, Sampled, pad_responses, unpad_prompts
from rlhf.rollout.scheduler import Request


@dataclass(kw_only=True)
class Outcome:
    """The rewards, messages and failures of an episode so far, and whether and how it ended."""

    rewards: list[float] = field(default_factory=list)  # one per turn
    messages: list[Utterance] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    ended: bool = False  # True if the environment ended the episode
    truncated: bool = False
    success: float = 0.0  # 1 or 0; 0 also if the environment does not report success


class EpisodeCounterpart(Counterpart, Protocol):
    """A ``Counterpart`` for one batch of episodes, which also keeps their outcomes."""

    def outcomes(self) -> Sequence[Outcome]:
        """Return the outcome of each episode; all episodes must have ended."""


class EpisodeLimits(NamedTuple):
    """The maximum number of tokens of a turn, and of an episode after its prompt."""

    turn: int
    episode: int


@dataclass
class EpisodeRollout:
    """A ``RolloutBackend`` whose responses are episodes.

    The fast backend decodes other rows while a row waits for its observation, and keeps the row's
    KV cache. Every other backend gets, for each turn, the conversation so far as a prompt, and
    prefills all of it again.
    """

    backend: RolloutBackend
    begin: Callable[[PromptBatch], EpisodeCounterpart]
    limits: EpisodeLimits
    pad_id: int
    ranks: Ranks

    def generate(self, actor: Engine, prompts: PromptBatch) -> Responses:
        """Return one episode per prompt."""
        counterpart, has_logprobs = self.begin(prompts), True
        if isinstance(self.backend, FastRollout):
            pause, tokens = partial(ParkedRows, counterpart), self.limits.episode
            episodes = self.backend.sample_conversations(actor, prompts, pause, max_tokens=tokens)
        else:
            episodes, has_logprobs = self._sample_turn_by_turn(actor, prompts, counterpart)
        device, outcomes = prompts.ids_BP.device, counterpart.outcomes()
        responses = pad_episodes(episodes, outcomes, pad_id=self.pad_id, device=device)
        return responses if has_logprobs else responses._replace(logprobs_BT=None)

    def _sample_turn_by_turn(
        self, actor: Engine, prompts: PromptBatch, counterpart: EpisodeCounterpart
    ) -> tuple[list[Request], bool]:
        """Sample the episodes; return them, and True if the backend returns log-probabilities.

        Turn k of all episodes is sampled in one batch. A rank whose episodes have all ended samples
        a turn that it discards while other ranks still sample, because a pass of a sharded model
        needs all ranks.
        """
        limit, has_logprobs = min(self.limits), True
        episodes = [Request(i, tuple(ids), limit) for i, ids in enumerate(unpad_prompts(prompts))]
        active = episodes
        while self.ranks.any(bool(active)):
            rows = active or episodes[:1]
            responses = self.backend.generate(actor, self._build_turn_prompts(prompts, rows))
            prompts = prompts._replace(keeps_weights=True)
            has_logprobs = responses.logprobs_BT is not None
            if not active:
                continue
            for episode, turn in zip(active, _split_into_rows(responses), strict=True):
                _add_turn(episode, turn)
                counterpart.submit_turn(episode)
            active = _add_observations(active, counterpart)
        return episodes, has_logprobs

    def _build_turn_prompts(self, prompts: PromptBatch, episodes: Sequence[Request]) -> PromptBatch:
        """Return the ``episodes`` so far as prompts, with the random draws for their next turns."""
        conversations = [[*episode.prompt, *episode.ids] for episode in episodes]
        padded = pad_rows(conversations, pad_id=self.pad_id, on_left=True)
        ids_BP, attend_BP = (copy_to_device(each, prompts.ids_BP.device) for each in padded)
        size = self.limits.turn
        draws = [prompts.draws_BT[e.index, e.first_draw :][:size] for e in episodes]
        texts = [prompts.texts[episode.index] for episode in episodes]
        filled = prompts._replace(ids_BP=ids_BP, attend_BP=attend_BP, draws_BT=torch.stack(draws))
        return filled._replace(texts=texts, columns=None, seeds=None)


def _split_into_rows(responses: Responses) -> list[Sampled]:
    logprobs_BT = responses.logprobs_BT
    if logprobs_BT is None:
        logprobs_BT = torch.zeros(responses.ids_BT.shape)
    tensors = (responses.ids_BT, logprobs_BT, responses.keep_BT, responses.ended_B)
    return [
        Sampled(ids[: sum(keep)], logprobs[: sum(keep)], ended)
        for ids, logprobs, keep, ended in zip(*(each.tolist() for each in tensors), strict=True)
    ]


def _add_turn(episode: Request, turn: Sampled) -> None:
    """Add a turn to an episode; drop the turn's tokens beyond ``episode.limit``."""
    room = episode.limit - len(episode.ids)
    episode.ids += turn.ids[:room]
    episode.logprobs += turn.logprobs[:room]
    episode.has_ended = turn.has_ended and len(turn.ids) <= room
    episode.turn_ends.append(len(episode.ids))


def _add_observations(active: Sequence[Request], counterpart: Counterpart) -> list[Request]:
    """Wait for the observations of the ``active`` episodes; return the episodes that continue."""
    by_index = {episode.index: episode for episode in active}
    due, continuing = len(active), []
    while due:
        new = counterpart.continuations(wait=True)
        due -= len(new)
        for each in new:
            if each.observation is not None:
                episode = by_index[each.row]
                episode.extend(each.observation, limit=each.limit, first_draw=each.first_draw)
                continuing.append(episode)
    return sorted(continuing, key=lambda episode: episode.index)


def pad_episodes(
    episodes: Sequence[Request], outcomes: Sequence[Outcome], *, pad_id: int, device: torch.device
) -> Responses:
    """Return the episodes as right-padded responses (B, T)."""
    padded = pad_responses(episodes, pad_id=pad_id, device=device)
    shape = padded.ids_BT.shape
    turn_BT, rewards_BT = torch.full(shape, NO_TURN), torch.zeros(shape)
    for row, (episode, outcome) in enumerate(zip(episodes, outcomes, strict=True)):
        spans = zip(episode.turn_starts, episode.turn_ends, outcome.rewards, strict=True)
        for turn, (start, end, reward) in enumerate(spans):
            turn_BT[row, start:end] = turn
            rewards_BT[row, end - 1] = reward
    ended_B = torch.tensor([outcome.ended for outcome in outcomes])
    truncated_B = torch.tensor([outcome.truncated for outcome in outcomes])
    success_B = torch.tensor([outcome.success for outcome in outcomes])
    copy = partial(copy_to_device, to=device)
    turns = Turns(
        attend_BT=padded.keep_BT,
        turn_BT=copy(turn_BT),
        rewards_BT=copy(rewards_BT),
        truncated_B=copy(truncated_B),
        success_B=copy(success_B),
        messages=[outcome.messages for outcome in outcomes],
        failures=[outcome.failures for outcome in outcomes],
    )
    keep_BT, extras = turns.turn_BT >= 0, turns._asdict()
    return padded._replace(keep_BT=keep_BT, ended_B=copy(ended_B), extras=extras)
