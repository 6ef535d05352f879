"""Export a checkpoint of a phase as a Hugging Face folder.

    python -m rlhf.export RUN_DIR/ppo/state/step-00000040 FOLDER [--average]

The models are built on this machine's CPU, in one process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf.checkpoint.phase_state import load_checkpoint
from rlhf.command import exit_code
from rlhf.config.choices import Device, Phase
from rlhf.config.freeze import MICRO_BATCHES, load_run
from rlhf.config.schema.run import RunConfig
from rlhf.engine.devices import current_ranks, resolve_dtype
from rlhf.engine.settings import EngineSettings
from rlhf.errors import ConfigError
from rlhf.models.build import ModelSource
from rlhf.models.tokenizers import load_tokenizer
from rlhf.phases.dpo import DpoTrainer
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.phases.reward import RewardTrainer
from rlhf.phases.sft import SftTrainer
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.exporting import exported
from rlhf.phases.shared.model_sources import policy_source
from rlhf.tracking.console import build_console
from rlhf.tracking.tracker import NullTracker
from rlhf.types import Engine

MAIN_MODEL = {Phase.sft: "model", Phase.reward: "model", Phase.ppo: "actor", Phase.dpo: "policy"}


def export_checkpoint(checkpoint: Path, folder: Path, *, average: bool = False) -> None:
    """Write the model of a checkpoint to ``folder``; with ``average`` PPO's moving average.

    Raises:
        ConfigError: if ``folder`` exists, or the run keeps no average.
        CheckpointError: if the checkpoint is damaged, or the run's other models are gone.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists: choose another folder")
    if not checkpoint.is_dir():
        raise ConfigError(f"{checkpoint} is no checkpoint: it must be RUN_DIR/PHASE/state/step-N")
    found = load_checkpoint(checkpoint.resolve())
    phase, run_dir = Phase(found.folder.parents[1].name), found.folder.parents[2]
    context = _context(run_dir)
    if average and not (phase is Phase.ppo and context.config.ppo.ema_beta):
        raise ConfigError("--average: only PPO with ppo.ema_beta keeps a moving average")
    engine, source = _built(context, phase)
    engine.training_state.load(found.reader(MAIN_MODEL[phase]))
    with engine.averaged() if average else nullcontext():
        export = exported(engine, as_=context.config.lora.export, source=source)
        what = f"The {phase} model after step {found.step}."
        context.save(export, folder, what=what, answers=phase is not Phase.reward)


def _context(run_dir: Path) -> RunContext:
    """Return the context of the run on one rank of this CPU, without data and trackers."""
    config = _on_one_cpu(load_run(run_dir))
    return RunContext(
        config=config,
        run_dir=run_dir,
        ranks=current_ranks(Device.cpu),
        settings=EngineSettings(
            zero=config.zero, dtype=resolve_dtype(config.hardware.dtype, Device.cpu)
        ),
        tokenizer=load_tokenizer(run_dir / "tokenizer", key="run tokenizer"),
        parts={},
        judge=None,
        console=build_console(is_main=True, log_every=1),
        tracker=NullTracker(),
    )


def _on_one_cpu(config: RunConfig) -> RunConfig:
    hardware = replace(config.hardware, device=Device.cpu, nodes=1, ranks_per_node=1)
    groups: dict[str, Any] = {key.partition(".")[0]: None for key in MICRO_BATCHES}
    for name in groups:
        groups[name] = replace(getattr(config, name), micro_batch_size=None)
    groups["ppo"] = replace(groups["ppo"], steps=groups["ppo"].steps or 1)
    return replace(config, hardware=hardware, **groups)


def _built(context: RunContext, phase: Phase) -> tuple[Engine, ModelSource]:
    """Return the engine of the phase's main model, and what the model started from."""
    match phase:
        case Phase.sft:
            sft = SftTrainer(context, total_steps=1)
            return sft.engine, sft.source
        case Phase.reward:
            reward = RewardTrainer(context, total_steps=1)
            return reward.engine, reward.source
        case Phase.dpo:
            return DpoTrainer(context, total_steps=1).policy, policy_source(context.config)
        case Phase.ppo:
            engine = RLHFEngine(context.config, context.ranks)
            return engine.actor, engine.policy_source


def main(arguments: Sequence[str]) -> int:
    """Export the checkpoint that the command names; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlhf.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="RUN_DIR/PHASE/state/step-N")
    parser.add_argument("folder", type=Path, help="new Hugging Face folder")
    parser.add_argument("--average", action="store_true", help="PPO's moving average")
    options = parser.parse_args(arguments)
    return exit_code(
        lambda: export_checkpoint(options.checkpoint, options.folder, average=options.average)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
