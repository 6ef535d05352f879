"""The context that every phase gets: its data, its heartbeats and its requests to stop.

SIGTERM and SIGUSR1 request a checkpoint; SIGTERM also ends the run. The handlers only store the
request; the phase answers it after the current step.
"""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rlhf.base.ranks import Ranks
from rlhf.base.user_paths import expand_user_path
from rlhf.checkpoint.phase_state import Checkpoint
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.data.pair_numbers import add_pair_numbers, read_pair_groups
from rlhf.data.splits import PhaseData
from rlhf.data.synthetic_pairs import GoldJudge
from rlhf.data.tokens import TokenData, cache_key, limit_of, tokenise
from rlhf.engine.settings import EngineSettings
from rlhf.tracking.console import Console
from rlhf.tracking.tracker import Tracker

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


class Heartbeat:
    """The time of the last heartbeat, which the watchdog reads; none is expected between phases."""

    def __init__(self) -> None:
        self._last: float | None = None

    def start(self) -> None:
        """Record a heartbeat, and expect more from now on: a step begins."""
        self._last = time.monotonic()

    def beat(self) -> None:
        """Record a heartbeat if more are expected: a batch of an evaluation begins."""
        if self._last is not None:
            self._last = time.monotonic()

    def stop(self) -> None:
        """Expect no more heartbeats: the last step has ended."""
        self._last = None

    @property
    def seconds_since_beat(self) -> float:
        """Return the seconds since the last heartbeat; 0 while none is expected."""
        last = self._last
        return 0.0 if last is None else time.monotonic() - last


class StoppedError(KeyboardInterrupt):
    """The run was asked to stop; its checkpoints are on the drive."""


class StopRequests:
    """Requests that signals have made: a checkpoint, or a checkpoint and the end of the run."""

    def __init__(self) -> None:
        self.wants_checkpoint = False
        self.wants_stop = False

    def listen(self, *, grace_seconds: int, stops: bool) -> None:
        """Install the signal handlers in this process's main thread.

        SIGUSR1 requests a checkpoint. With ``stops``, SIGTERM requests a checkpoint and a stop:
        StoppedError is raised if the step has not ended after ``grace_seconds``, and a second
        SIGTERM ends the process at once. Without ``stops``, SIGTERM and SIGUSR2 also request only a
        checkpoint, because SLURM ends the process.
        """

        def save(_: int, __: FrameType | None) -> None:
            self.wants_checkpoint = True

        def stop(_: int, __: FrameType | None) -> None:
            self.wants_checkpoint = self.wants_stop = True
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
            signal.alarm(grace_seconds)

        def give_up(_: int, __: FrameType | None) -> None:
            raise StoppedError("the step did not end in time")

        signal.signal(signal.SIGUSR1, save)
        signal.signal(signal.SIGTERM, stop if stops else save)
        if stops:
            signal.signal(signal.SIGALRM, give_up)
        else:
            signal.signal(signal.SIGUSR2, save)


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One rank's view of the run: its configuration, ranks, data and outputs."""

    config: RunConfig
    run_dir: Path
    ranks: Ranks
    settings: EngineSettings
    tokenizer: PreTrainedTokenizerBase
    parts: Mapping[Phase, PhaseData]
    judge: GoldJudge | None
    console: Console
    tracker: Tracker
    resumes: Mapping[Phase, Checkpoint] = field(default_factory=dict)  # of stopped phases
    requests: StopRequests = field(default_factory=StopRequests)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    phase_started: float = field(default_factory=time.monotonic)  # seconds of time.monotonic()


def phase_records(context: RunContext, phase: Phase) -> PhaseData:
    """Return the records that a phase trains on; DPO uses the reward phase's pairs."""
    return context.parts[phase.data_share]


def phase_tokens(context: RunContext, phase: Phase) -> TokenData:
    """Return the phase's token ids."""
    return _tokenise(context, phase_records(context, phase), phase)


def reward_pairs(context: RunContext) -> tuple[Dataset, Dataset]:
    """Return pairs to train on and held-out pairs, with the numbers that the loss reads."""
    data, records = phase_tokens(context, Phase.reward), phase_records(context, Phase.reward)
    add = partial(add_pair_numbers, config=context.config.reward)
    return add(data.train, records.train), add(data.eval, records.eval)


def phase_prompts(context: RunContext, phase: Phase) -> TokenData:
    """Return the prompts of a phase's records, as token ids."""
    return _tokenise(context, phase_records(context, phase), Phase.ppo)


def phase_data_hash(context: RunContext, phase: Phase) -> str:
    """Return a hash of the phase's records, the tokenizer, the token limit and the template.

    The hash of the reward phase includes the groups of pairs on which the model is measured.
    """
    config = context.config
    groups = read_pair_groups(config.reward.groups_path) if phase is Phase.reward else {}
    measured = hashlib.sha256(repr(sorted(groups.items())).encode()).hexdigest() if groups else ""
    return measured + cache_key(
        phase_records(context, phase),
        phase,
        context.tokenizer,
        limit=limit_of(phase, config).tokens,
        template=config.data.template,
    )


def _tokenise(context: RunContext, part: PhaseData, phase: Phase) -> TokenData:
    config = context.config
    return tokenise(
        part,
        phase,
        context.tokenizer,
        limit=limit_of(phase, config),
        cache_dir=expand_user_path(config.data.cache_dir, key="data.cache_dir"),
        template=config.data.template,
    )
