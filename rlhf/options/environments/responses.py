"""Responses that are episodes: the environments that answer, measures, and texts for samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.base.ranks import Ranks
from rlhf.base.seams import Shown
from rlhf.base.types import Responses, Rollout, RolloutBackend
from rlhf.config.schema.run import RunConfig
from rlhf.data.encoding import Encoder
from rlhf.data.records import Record
from rlhf.options.environments.episode_counterpart import Episodes
from rlhf.options.environments.episodes import EpisodeLimits, EpisodeRollout
from rlhf.options.environments.interface import EnvironmentPool, EpisodeStart, Player, play_episodes
from rlhf.options.environments.keys import FailureName
from rlhf.options.environments.process_pool import build_pool
from rlhf.options.environments.turns import Utterance, turns_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUP, FAILURES = "episode/", "failures/"
SUCCESS = f"{GROUP}success"


class EnvironmentPartner:
    """A ``Partner`` that answers the policy's turns by a pool of environments."""

    def __init__(self, config: RunConfig, pool: EnvironmentPool) -> None:
        self._config = config
        self._pool = pool

    def wrap_backend(
        self, backend: RolloutBackend, tokenizer: PreTrainedTokenizerBase, ranks: Ranks
    ) -> RolloutBackend:
        """Return a backend that samples by ``backend``; its responses are episodes."""
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
        facts, found = self._pool.facts, {}
        if facts.optimum is not None:
            found["optimum"] = facts.optimum
        if Player.random in facts.players:
            starts = [EpisodeStart(r.seed, r.columns or {}) for r in records if r.seed is not None]
            most = self._config.environment.max_turns
            played = play_episodes(self._pool, starts, player=Player.random, max_turns=most)
            found["random_return"] = sum(each.total_reward for each in played) / len(played)
        return found

    def close(self) -> None:
        """End the processes of the environments."""
        self._pool.close()


def open_partner(config: RunConfig) -> EnvironmentPartner:
    """Return the partner of this rank; the processes of its environments have started."""
    return EnvironmentPartner(config, build_pool(config.environment))


def score(responses: Responses) -> Tensor:
    """Return the sums (B,) of the rewards of each episode."""
    turns = turns_of(responses)
    assert turns is not None, "kind=environment without episodes"
    return turns.rewards_BT.sum(dim=1)


def measure_responses(responses: Responses) -> dict[str, Tensor]:
    """Return measures (B,) of episodes; {} for responses that are not episodes.

    ``episode/failures/NAME`` is the number of failures of the kind NAME in each episode.
    """
    turns = turns_of(responses)
    if turns is None:
        return {}
    counts = {
        f"{FAILURES}{name}": [found.count(name) for found in turns.failures] for name in FailureName
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
        Shown(f"[episode {seed}]{text}", join_messages(said), [each._asdict() for each in said])
        for seed, text, said in zip(prompts.seeds, prompts.texts, turns.messages, strict=True)
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
