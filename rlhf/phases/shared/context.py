"""The context that every phase gets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.base.ranks import Ranks
from rlhf.checkpoint.phase_state import Checkpoint
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.data.splits import PhaseData
from rlhf.data.synthetic_pairs import GoldJudge
from rlhf.engine.settings import EngineSettings
from rlhf.phases.shared.step_signals import Heartbeat, StopRequests
from rlhf.tracking.console import Console
from rlhf.tracking.tracker import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
