"""What is measured of episodes beside what is measured of every response. Shapes: B = episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.base.types import Responses, Rollout, Utterance
from rlhf.config.choices import FailureName
from rlhf.data.records import Record
from rlhf.environments.interface import EnvironmentPool, EpisodeStart, Player
from rlhf.environments.play import play_episodes

FAILURES = "failures/"


def episode_values(responses: Responses) -> dict[str, Tensor]:
    """Return measures (B,) of episodes by name; {} of single responses.

    ``failures/NAME`` counts a failure in each episode.
    """
    turns = responses.turns
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
    return {name: values_B.float() for name, values_B in values.items()}


def shown_texts(rollout: Rollout, responses: Sequence[str]) -> list[tuple[str, str]]:
    """Return prompt and response of each row as a reader sees them, given the ``responses``.

    Episodes may begin alike: their seeds tell them apart.
    """
    prompts, turns = rollout.prompts, rollout.responses.turns
    if turns is None or prompts.seeds is None:
        return list(zip(prompts.texts, responses, strict=True))
    texts = zip(prompts.seeds, prompts.texts, turns.messages, strict=True)
    return [(f"[episode {seed}]{text}", spoken_text(said)) for seed, text, said in texts]


def spoken_text(messages: Sequence[Utterance]) -> str:
    """Return an episode's turns as one text, with observations in brackets."""
    return " ".join(text if role == "assistant" else f"[{role}: {text}]" for role, text in messages)


def play_at_random(
    pool: EnvironmentPool, records: Sequence[Record], *, max_turns: int
) -> float | None:
    """Return the mean return of random turns in the records' episodes; None without such turns."""
    if Player.random not in pool.facts.players:
        return None
    starts = [
        EpisodeStart(r.episode.seed, r.columns or {}) for r in records if r.episode is not None
    ]
    played = play_episodes(pool, starts, player=Player.random, max_turns=max_turns)
    return sum(episode.total for episode in played) / len(played)


def episode_results(by_prompt: Mapping[str, list[float]], when: str) -> dict[str, Any]:
    """Return the entries of result.json for episodes with these values; {} without episodes."""
    values = {n.removeprefix("episode/"): v for n, v in by_prompt.items() if "episode/" in n}
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
