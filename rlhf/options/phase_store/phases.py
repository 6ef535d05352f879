"""Train a phase once for all runs that would train it with the same inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import Timeout

from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.finite_numbers import replace_non_finite
from rlhf.base.foreign_errors import reason_of
from rlhf.base.ranks import Ranks
from rlhf.base.versions import code_version
from rlhf.config.choices import Phase
from rlhf.engine.devices import resolve_dtype
from rlhf.options.phase_store.phase_store import PhaseStore, phase_key, shared_phases
from rlhf.phases.shared.context import RunContext, phase_data_hash


def train_or_reuse(
    context: RunContext,
    phase: Phase,
    train: Callable[[], dict[str, Any]],
    reuse: Callable[[Path], None],
) -> None:
    """Reuse the phase if the store has it; otherwise train and store it."""
    store, key = PhaseStore(max_gib=context.config.reuse.max_gib), compute_store_key(context, phase)
    if key is None:
        train()
        return
    with hold_entry_lock(store, key, context.ranks):
        # Only rank 0 reads the store: other nodes may lack it, and one rank can hash all files.
        entry = store.find(key, phase, context.console.say) if context.ranks.is_main else None
        if context.ranks.any(entry is not None):
            reuse(store.folder / key)
            return
        result = train()
        if context.ranks.is_main and replace_non_finite(result) == result:
            store_phase(context, store, key, phase)


def store_phase(context: RunContext, store: PhaseStore, key: str, phase: Phase) -> None:
    """Store a phase for other runs; a failure only prints a line, since this run has the phase."""
    try:
        store.put(key, phase, context.run_dir)
    except (OSError, CheckpointError) as error:
        context.console.say(f"{phase}: not stored in {store.folder} ({reason_of(error)})")


def compute_store_key(context: RunContext, phase: Phase) -> str | None:
    """Return the phase's key in the store of phases; None if this run does not use the store."""
    config, hardware = context.config, context.config.hardware
    # The dtype of auto depends on the machine, and on variables such as ONEDNN_MAX_CPU_ISA.
    dtype = resolve_dtype(hardware.dtype, hardware.device)
    config = replace(config, hardware=replace(hardware, dtype=dtype))
    if phase not in shared_phases(config):
        return None
    so_far = config.phase.order[: config.phase.order.index(phase) + 1]
    data = "".join(phase_data_hash(context, each) for each in so_far)
    return phase_key(config, phase, data=data, code=code_version())


@contextmanager
def hold_entry_lock(store: PhaseStore, key: str, ranks: Ranks) -> Iterator[None]:
    """Hold the lock of a store entry on rank 0 within the context; all ranks wait for the lock.

    Rank 0 tries once per second and sends the result, so that no collective waits longer.

    Raises:
        ConfigError: if the store cannot be written.
    """
    lock = store.entry_lock(key)
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
