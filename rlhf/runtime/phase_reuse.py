"""Run a phase once for all runs that would train it with the same inputs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import Timeout

from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.finite_numbers import replace_non_finite
from rlhf.base.foreign_errors import reason_of
from rlhf.base.ranks import Ranks
from rlhf.checkpoint.finished_phase import (
    STATE,
    copy_phase_lines,
    finish_phase,
    iterate_metrics,
    verify_phase,
)
from rlhf.checkpoint.phase_store import PhaseStore, code_version, link_phase, phase_key
from rlhf.checkpoint.results import read_phase_result, reused_phases
from rlhf.config.choices import Phase, Reuse
from rlhf.config.run_dir import refuse_links
from rlhf.config.schema.run import RunConfig
from rlhf.engine.devices import reset_peak_memory, resolve_dtype
from rlhf.phases.shared.context import RunContext, phase_data_hash
from rlhf.runtime.run_result import compare_phase_with_plan

PrintNote = Callable[[str], None]
REUSED = (Phase.sft, Phase.reward)  # sweeps and searches vary only later phases


def run_phase(
    context: RunContext, phase: Phase, runner: Callable[[RunContext], dict[str, Any]]
) -> None:
    """Run a phase and write its result, or take it from another run that had the same inputs."""
    config, run_dir, ranks = context.config, context.run_dir, context.ranks
    if phase in reused_phases(config):
        reuse_phase(context, phase, Path(str(config.from_run)))
        return
    store, key = PhaseStore(max_gib=config.reuse.max_gib), key_in_store(context, phase)
    with ExitStack() as stack:
        if key is not None:
            stack.enter_context(hold_entry_lock(store, key, ranks))
            # Only rank 0: others may not see its store, and files should be hashed only once.
            found = store.find(key, phase, context.console.say) if ranks.is_main else None
            if ranks.any(found is not None):
                reuse_phase(context, phase, store.folder / key)
                return
        reset_peak_memory(ranks)
        result = runner(replace(context, phase_started=time.monotonic()))
        result |= compare_phase_with_plan(run_dir, phase, result["seconds"], ranks)
        if ranks.is_main:
            finish_phase(run_dir, phase, result)
            if not config.checkpoint.keep_finished:
                shutil.rmtree(run_dir / phase / STATE, ignore_errors=True)
            if key is not None and replace_non_finite(result) == result:
                store_phase(context, store, key, phase)
        ranks.barrier()


def store_phase(context: RunContext, store: PhaseStore, key: str, phase: Phase) -> None:
    """Store a phase for other runs; a failure prints a line, since this run has the phase."""
    try:
        store.put(key, phase, context.run_dir)
    except (OSError, CheckpointError) as error:
        context.console.say(f"{phase}: not stored in {store.folder} ({reason_of(error)})")


def verify_finished_phases(
    run_dir: Path, finished: Sequence[Phase], config: RunConfig, say: PrintNote
) -> None:
    """Verify the phases that a resumed run has finished, and remove what a killed attempt left."""
    refuse_links(run_dir, [f"{phase}{under}" for phase in finished for under in ("", f"/{STATE}")])
    for phase in finished:
        if (notice := verify_phase(run_dir, phase)) is not None:
            say(f"warning: {notice}")
        left = [*(run_dir / phase).glob(".*.building")]
        left += [] if config.checkpoint.keep_finished else [run_dir / phase / STATE]
        for path in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def key_in_store(context: RunContext, phase: Phase) -> str | None:
    """Return the phase's key in the store of phases; None if this run does not use the store."""
    config, hardware = context.config, context.config.hardware
    # What auto stands for depends on the machine, and on variables such as ONEDNN_MAX_CPU_ISA.
    dtype = resolve_dtype(hardware.dtype, hardware.device)
    config = replace(config, hardware=replace(hardware, dtype=dtype))
    if config.reuse.phases is not Reuse.always or phase not in REUSED:
        return None
    so_far = config.phase.order[: config.phase.order.index(phase) + 1]
    data = "".join(phase_data_hash(context, each) for each in so_far)
    return phase_key(config, phase, data=data, code=code_version())


@contextmanager
def hold_entry_lock(store: PhaseStore, key: str, ranks: Ranks) -> Iterator[None]:
    """Hold the lock of a store entry on rank 0 within the context; all ranks wait for the lock.

    All ranks check together once per second, so that no collective waits longer than that.

    Raises:
        ConfigError: if the store cannot be written.
    """
    lock = store.lock(key)
    while True:
        if ranks.is_main:
            try:
                store.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
                with suppress(Timeout):
                    lock.acquire(blocking=False)
            except OSError as error:
                raise ConfigError(
                    f"reuse.phases=always: the store {store.folder} cannot be written "
                    f"({error.strerror or error}); set RLHF_CACHE to a folder that can be written, "
                    "or reuse.phases=never"
                ) from error
        if ranks.any(lock.is_locked):
            break
        time.sleep(1)
    try:
        yield
    finally:
        lock.release()


def reuse_phase(context: RunContext, phase: Phase, source: Path) -> None:
    """Copy a finished phase, with its metrics and samples, from the folder ``source``.

    Raises:
        CheckpointError: if the phase is damaged. Entries of the store were verified before.
    """
    run_dir, ranks = context.run_dir, context.ranks
    if ranks.is_main:
        if phase in reused_phases(context.config) and (notice := verify_phase(source, phase)):
            context.console.say(f"warning: {notice}")
        run = (read_phase_result(source, phase) or {}).get("reused_from", str(source))
        for step, values in iterate_metrics(source, phase):
            context.tracker.log(phase, step, values)
        copy_phase_lines(source, phase, run_dir, "samples.jsonl")
        link_phase(source, phase, run_dir, reused_from=run)
        context.console.say(f"{phase}: taken from {run}, which had the same inputs")
    ranks.barrier()
