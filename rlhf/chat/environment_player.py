"""Let a model of a run play an episode of the run's environment."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from rlhf.base.errors import ConfigError
from rlhf.chat.run_models import RunModels
from rlhf.chat.talker import WriteText
from rlhf.config.freeze import load_run
from rlhf.data.encoding import Encoder, first_record
from rlhf.environments.interface import EnvironmentPool, Reply
from rlhf.environments.process_pool import build_pool
from rlhf.rollout.sampling import SamplingSettings


def play_episode(
    models: RunModels, run_dir: Path, sampling: SamplingSettings, *, seed: int, write: WriteText
) -> None:
    """Write every turn of the policy and of the environment, and what the episode came to.

    Raises:
        ConfigError: if the run has no environment, or it cannot be made.
    """
    config = load_run(run_dir)
    if not config.environment.is_used:
        raise ConfigError(
            f"--environment: {run_dir} has environment.kind=none; without --environment you talk "
            "to its model yourself"
        )
    talker, total = models.talker, 0.0
    encoder = Encoder(talker.tokenizer, config.data.template)
    with closing(build_pool(config.environment)) as pool:
        pool.reset(0, seed=seed, row={})
        reply = _next_reply(pool)
        first = reply.observation
        write(f"{first.role}: {first.text}\n")
        ids = encoder.prompts([encoder.asked(first_record(first.role, first.text))])[0]
        for _ in range(config.environment.max_turns):
            if reply.has_ended:
                break
            write("assistant: ")
            answer = talker.answer(ids, sampling, write)
            pool.step(0, answer.text)
            reply = _next_reply(pool)
            total += reply.step.reward
            said = reply.observation
            write(f"\n{said.role}: {said.text}\n")
            ended = [] if answer.why == "ended" else [encoder.end_id]
            ids = [*ids, *answer.ids, *ended, *encoder.observations([(said.role, said.text)])[0]]
    success = reply.step.info.get("success")
    how = f"failed ({reply.failure}: {reply.problem})" if reply.failure else "ended"
    known = "" if success is None else f", success: {'yes' if success else 'no'}"
    write(f"episode {seed} {how}: return {total:g}{known}\n")


def _next_reply(pool: EnvironmentPool) -> Reply:
    return pool.replies(wait=True)[0]
