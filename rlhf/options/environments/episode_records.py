"""Make the records of a run from episodes: with an expert's turns for SFT, without them for PPO."""

from __future__ import annotations

from contextlib import closing
from random import Random

from rlhf.base.errors import ConfigError, DataError
from rlhf.config.choices import SPLIT_PHASES, Phase
from rlhf.config.schema.run import RunConfig
from rlhf.data.plain_turns import record_of_observation
from rlhf.data.records import Message, Record
from rlhf.data.splits import PhaseData, apportion
from rlhf.options.environments.interface import (
    EnvironmentPool,
    EpisodeStart,
    PlayedEpisode,
    Player,
    play_episodes,
)
from rlhf.options.environments.keys import EnvironmentConfig
from rlhf.options.environments.process_pool import build_pool

SEED_LIMIT = 2**31  # all seeds are smaller, because some packages take signed 32-bit seeds


def load_records(config: RunConfig) -> dict[Phase, PhaseData]:
    """Return the records of each phase, one per episode, divided by data.split.

    Each episode has its own seed, which depends on the seed of the run's data.

    Raises:
        ConfigError: if the run has an SFT phase, and the environment has no expert.
        DataError: if an episode fails, or a phase gets too few episodes.
    """
    data, environment, order = config.data, config.environment, config.phase.order
    seeds = Random(f"episodes {config.data_seed}").sample(range(SEED_LIMIT), data.size)
    parts: dict[Phase, PhaseData] = {}
    with closing(build_pool(environment)) as pool:
        for phase, size in zip(SPLIT_PHASES, apportion(data.size, data.split), strict=True):
            phase_seeds, seeds = seeds[:size], seeds[size:]
            if phase not in order:
                parts[phase] = PhaseData([], [])
                continue
            records = _play_records(environment, pool, phase_seeds, plays=phase is Phase.sft)
            held_out = max(1, round(size * data.eval_share))
            if held_out >= size:
                raise DataError(
                    f"data.size={data.size} with data.split={data.split}: the {phase} phase gets "
                    f"{size} episodes and needs two or more, one of them held out"
                )
            parts[phase] = PhaseData(records[held_out:], records[:held_out])
    return parts


def _play_records(
    environment: EnvironmentConfig, pool: EnvironmentPool, seeds: list[int], *, plays: bool
) -> list[Record]:
    """Return a record for each seed, with the expert's turns if the expert ``plays``."""
    if plays and Player.expert not in pool.facts.players:
        raise ConfigError(
            f"environment.kind={environment.kind}: it has no expert (demonstration), so SFT has "
            "nothing to learn from; use phase=ppo with model=pretrained model.path=FOLDER"
        )
    player = Player.expert if plays else None
    starts = [EpisodeStart(seed) for seed in seeds]
    played = play_episodes(pool, starts, player=player, max_turns=environment.max_turns)
    for episode, start in zip(played, starts, strict=True):
        if episode.failure is not None:
            raise DataError(
                f"environment.kind={environment.kind}: the episode with seed {start.seed} failed "
                f"({episode.failure}): {episode.problem}"
            )
    return [_build_record(start, episode) for start, episode in zip(starts, played, strict=True)]


def _build_record(start: EpisodeStart, episode: PlayedEpisode) -> Record:
    record = record_of_observation(episode.first.role, episode.first.text)
    turns = [*(record.messages or ())]
    for turn in episode.turns:
        turns.append(Message("assistant", turn.text))
        if turn.observation is not None:
            turns.append(Message(turn.observation.role, turn.observation.text))
    chosen = f" {episode.turns[0].text}" if episode.turns else None
    played = tuple(turns) if episode.turns else ()
    return record._replace(chosen=chosen, columns={}, seed=start.seed, turns=played)
