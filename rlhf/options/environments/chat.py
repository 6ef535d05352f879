"""Let a model play an episode of its environment, instead of a chat with a user."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.base.errors import ConfigError
from rlhf.config.freeze import load_run
from rlhf.data.encoding import Encoder
from rlhf.data.plain_turns import record_of_observation

if TYPE_CHECKING:
    from rlhf.chat.talker import Talker
    from rlhf.options.environments.interface import EnvironmentPool, Reply
    from rlhf.rollout.sampling import SamplingSettings


def play_episode(
    run_dir: Path,
    talker: Talker,
    sampling: SamplingSettings,
    *,
    seed: int,
    write: Callable[[str], None],
) -> None:
    """Let the model play an episode; write its turns, its observations and its return.

    Raises:
        ConfigError: if the run has no environment, or the environment cannot be made.
    """
    from rlhf.options.environments.process_pool import build_pool  # not for runs without episodes

    config, total = load_run(run_dir), 0.0
    if not config.environment.is_used:
        raise ConfigError(
            f"--environment: {run_dir} has environment.kind=none; without --environment you talk "
            "to its model yourself"
        )
    encoder = Encoder(talker.tokenizer, config.data.template)
    with closing(build_pool(config.environment)) as pool:
        pool.reset(0, seed=seed, row={})
        reply = _next_reply(pool)
        observation = reply.observation
        write(f"{observation.role}: {observation.text}\n")
        ids = encoder.encode_contexts(
            [encoder.render_prompt(record_of_observation(observation.role, observation.text))]
        )[0]
        for _ in range(config.environment.max_turns):
            if reply.has_ended:
                break
            write("assistant: ")
            answer = talker.answer(ids, sampling, write)
            pool.step(0, answer.text)
            reply = _next_reply(pool)
            total += reply.step.reward
            observation = reply.observation
            write(f"\n{observation.role}: {observation.text}\n")
            end_ids = [] if answer.ending == "ended" else [encoder.end_id]
            ids = [
                *ids,
                *answer.ids,
                *end_ids,
                *encoder.encode_observations([(observation.role, observation.text)])[0],
            ]
    success = reply.step.info.get("success")
    ending = f"failed ({reply.failure}: {reply.problem})" if reply.failure else "ended"
    known_success = "" if success is None else f", success: {'yes' if success else 'no'}"
    write(f"episode {seed} {ending}: return {total:g}{known_success}\n")


def _next_reply(pool: EnvironmentPool) -> Reply:
    return pool.replies(wait=True)[0]
