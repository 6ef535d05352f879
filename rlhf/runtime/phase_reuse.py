"""Run a phase once for all runs that would train it with the same inputs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from rlhf.checkpoint.phase_state import STATE
from rlhf.checkpoint.phase_store import (
    READ,
    PhaseStore,
    code_version,
    copy_samples,
    link_phase,
    logged,
    phase_key,
)
from rlhf.checkpoint.results import phase_result, phase_result_path, taken_phases, write_json
from rlhf.config.choices import Phase, Reuse
from rlhf.errors import ConfigError
from rlhf.phases.shared.context import RunContext
from rlhf.runtime.plan_comparison import beside_the_plan
from rlhf.types import Ranks


def run_phase(
    context: RunContext, phase: Phase, runner: Callable[[RunContext], dict[str, Any]]
) -> None:
    """Run a phase and write its result, or take it from another run that had the same inputs."""
    config, run_dir, ranks = context.config, context.run_dir, context.ranks
    if phase in taken_phases(config):
        take_phase(context, phase, Path(str(config.from_run)))
        return
    store, key = PhaseStore(max_gib=config.reuse.max_gib), store_key(context, phase)
    with ExitStack() as stack:
        if key is not None:
            stack.enter_context(one_at_a_time(store.folder / f"{key}.lock", ranks))
            if (entry := store.find(key, phase)) is not None:
                take_phase(context, phase, entry)
                return
        result = runner(replace(context, phase_started=time.monotonic()))
        result |= beside_the_plan(run_dir, phase, result["seconds"], ranks)
        if ranks.is_main:
            write_json(phase_result_path(run_dir, phase), result)
            if not config.checkpoint.keep_finished:
                shutil.rmtree(run_dir / phase / STATE, ignore_errors=True)
            if key is not None:
                store.put(key, phase, run_dir)
        ranks.barrier()


def store_key(context: RunContext, phase: Phase) -> str | None:
    """Return the phase's key in the store of phases; None if this run does not use the store."""
    config = context.config
    if config.reuse.phases is not Reuse.always or phase not in READ:
        return None
    so_far = config.phase.order[: config.phase.order.index(phase) + 1]
    data = "".join(context.data_key(each) for each in so_far)
    return phase_key(config, phase, data=data, code=code_version())


@contextmanager
def one_at_a_time(path: Path, ranks: Ranks) -> Iterator[None]:
    """Hold the lock on ``path`` in rank 0: other runs wait, and so do this run's other ranks.

    All ranks ask together once per second, so that no collective waits longer than that.

    Raises:
        ConfigError: if the folder of ``path`` cannot be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"reuse.phases=always: the store {path.parent} cannot be created ({error.strerror}); "
            "set RLHF_CACHE to a folder that can be written, or reuse.phases=never"
        ) from error
    lock = FileLock(path)
    while True:
        if ranks.is_main:
            with suppress(Timeout):
                lock.acquire(blocking=False)
        if ranks.max(torch.tensor(float(lock.is_locked), device=ranks.device)):
            break
        time.sleep(1)
    try:
        yield
    finally:
        lock.release()


def take_phase(context: RunContext, phase: Phase, source: Path) -> None:
    """Take a finished phase from the folder ``source``, with its metrics and samples."""
    run_dir, ranks = context.run_dir, context.ranks
    if ranks.is_main:
        run = (phase_result(source, phase) or {}).get("reused_from", str(source))
        for step, values in logged(source, phase):
            context.tracker.log(phase, step, values)
        copy_samples(source, phase, run_dir)
        link_phase(source, phase, run_dir, reused_from=run)
        context.console.say(f"{phase}: taken from {run}, which had the same inputs")
    ranks.barrier()
