"""Store and load checkpoints of a phase in progress, and record its best step so far.

    <run>/<phase>/state/step-00000040/
        ENGINE/*.safetensors   the training state of one model (rlhf/engine/training_state.py);
                               of several ranks: ENGINE/rank-RANK/*.safetensors
        state.json             everything else: step, counters of the engines and of the phase
        manifest.json          size and SHA-256 of every file above

Each rank writes its slices of the tensors; a slice that starts at index I > 0 is named TENSOR@I.
A checkpoint is written to a temporary folder, flushed to the drive, and renamed. On loading every
file is compared with the manifest: a checkpoint that is incomplete or changed is not used.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.base.atomic import is_transient, remove, replace_atomically, retry_transient_errors
from rlhf.base.errors import CapabilityError, CheckpointError, ConfigError
from rlhf.base.foreign_errors import remedy_of
from rlhf.base.ranks import Ranks
from rlhf.base.stored_files import (
    MANIFEST,
    OTHERS,
    RESULT,
    Identity,
    check_files,
    file_identity,
    find_entries,
    find_files,
    read_json,
)
from rlhf.base.types import TensorSlice
from rlhf.base.versions import installed_version
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.options import CheckpointConfig
from rlhf.run.finished_phase import STATE
from rlhf.run.metric_table import better_direction
from rlhf.run.model_folder import SHARD_BYTES, write_shards
from rlhf.run.results import phase_result_path

STATE_JSON = "state.json"
# What state.json must contain; states without a format are of format 1.
STATE_FORM = {"step": int, "logs": {OTHERS: int}, "format?": int, "version?": str}
STATE_FORMAT = 1  # raise it if this version cannot continue from the states of earlier versions
GIB = 1 << 30
RANK_FILE_BYTES = SHARD_BYTES // 8  # eight ranks of a node hold as much in memory as one rank
Streams = Mapping[str, Iterable[TensorSlice]]  # this rank's slices of each engine's tensors
SINGLE_RANK = Ranks()


class SkippedError(CheckpointError):
    """The error for a checkpoint that a network drive refused; the next checkpoint may succeed."""


class Checkpoint(NamedTuple):
    """A checkpoint of a phase: its folder, step, and the content of state.json."""

    folder: Path
    step: int
    state: Mapping[str, Any]

    def build_tensor_reader(self, engine: str) -> Callable[[str, slice], Tensor]:
        """Build a function that reads a slice of a flat tensor of ``engine``, given its name.

        Raises:
            CheckpointError: when the function is called, if the checkpoint is of another model.
        """
        from safetensors import safe_open

        slices: dict[str, list[tuple[int, Any]]] = {}  # start and content of a tensor's slices
        for path in find_files(self.folder / engine, "**/*.safetensors"):  # by rank, thus by start
            file: Any = safe_open(path, "pt")
            for key in file.keys():  # noqa: SIM118 - no dict
                name, _, start = key.partition("@")
                slices.setdefault(name, []).append((int(start or 0), file.get_slice(key)))

        def read_part(name: str, part: slice) -> Tensor:
            if name not in slices:
                raise CheckpointError(
                    f"{self.folder}: {engine} has no {name}: it is the checkpoint of another model"
                )
            begin, end, _ = part.indices(sys.maxsize)
            pieces = [
                content[max(begin - start, 0) : end - start]
                for start, content in slices[name]
                if not start or (start < end and begin < start + content.get_shape()[0])
            ]
            return torch.cat(pieces)

        return read_part


def checkpoint_folder(phase_dir: Path, step: int) -> Path:
    """Return the path of the checkpoint after ``step``."""
    return phase_dir / STATE / f"step-{step:08}"


def write_checkpoint(
    phase_dir: Path,
    step: int,
    streams: Streams,
    state: Mapping[str, Any],
    *,
    wanted_bytes: int,
    ranks: Ranks = SINGLE_RANK,
) -> None:
    """Write the checkpoint after ``step``; ``streams`` yield this rank's slices of each engine.

    All ranks must call this function, and all raise the same error.

    Raises:
        SkippedError: if all retries of a rank failed.
        CheckpointError: if it cannot be written, as on a full drive; earlier checkpoints stay.
    """
    from safetensors import SafetensorError

    folder = checkpoint_folder(phase_dir, step)
    version = installed_version("rlhf")
    content = {"step": step, **state, "format": STATE_FORMAT, "version": version}
    cleanup = ExitStack()  # of rank 0

    def begin() -> Path:
        retry_transient_errors(lambda: folder.parent.mkdir(parents=True, exist_ok=True))
        free = retry_transient_errors(lambda: shutil.disk_usage(folder.parent)).free
        if free < wanted_bytes:
            raise CheckpointError(
                f"{folder}: a checkpoint needs {wanted_bytes / GIB:.3g} GiB, and "
                f"{free / GIB:.3g} GiB are free. Earlier checkpoints are intact; make room and "
                "resume the run, or write none (checkpoint.every_minutes=null, every_steps=null)"
            )
        return cleanup.enter_context(replace_atomically(folder))

    def finish() -> None:
        retry_transient_errors(lambda: _write_json_files(building, content, files))
        cleanup.close()
        retry_transient_errors(lambda: _flush_folder(folder.parent))

    try:
        with cleanup:
            building = ranks.together(begin if ranks.is_main else lambda: folder)[0]
            shares = ranks.together(lambda: _write_share(building, streams, ranks))
            files = {name: identity for share in shares for name, identity in share.items()}
            ranks.together(finish if ranks.is_main else lambda: None)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        if is_transient(error):
            raise SkippedError(
                f"{folder}: the checkpoint is skipped, since the drive refused it several times "
                f"({reason}). Earlier checkpoints are intact"
            ) from error
        raise CheckpointError(
            f"{folder}: the checkpoint cannot be written ({reason}). Earlier "
            f"checkpoints are intact; {remedy_of(error)}, and resume the run"
        ) from error


def _write_share(building: Path, streams: Streams, ranks: Ranks) -> dict[str, Identity]:
    """Write this rank's slices of each engine; return the identities of the files, by path."""
    files = {}
    limit = SHARD_BYTES if ranks.size == 1 else RANK_FILE_BYTES
    for engine, stream in streams.items():
        folder = building / engine / (f"rank-{ranks.rank:05}" if ranks.size > 1 else "")
        folder.mkdir(parents=True)
        named = ((f"{name}@{start}" if start else name, each) for name, start, each in stream)
        write_shards(folder, named, limit, ranks.report_progress)
        for path in find_entries(folder, "*"):
            identity = retry_transient_errors(partial(file_identity, path, flush=True))
            files[path.relative_to(building).as_posix()] = identity
            ranks.report_progress()
    return files


def _write_json_files(building: Path, state: Mapping[str, Any], files: dict[str, Identity]) -> None:
    """Write the state and the manifest beside the tensors, and flush both to the drive."""
    (building / STATE_JSON).write_text(json.dumps(state), encoding="utf-8")
    listed = {**files, STATE_JSON: file_identity(building / STATE_JSON, flush=True)}
    text = json.dumps(listed, indent=1, sort_keys=True)
    (building / MANIFEST).write_text(text, encoding="utf-8")
    file_identity(building / MANIFEST, flush=True)


def checkpoint_folders(phase_dir: Path) -> list[Path]:
    """Return the folders of a phase's checkpoints, verified or not, the latest first; no links."""
    state = phase_dir / STATE
    entries = () if phase_dir.is_symlink() or state.is_symlink() else find_entries(state, "step-*")
    folders = (each for each in entries if each.is_dir() and not each.is_symlink())
    return sorted((each for each in folders if each.name[5:].isdecimal()), reverse=True)


def reopen_ppo(run_dir: Path, config: RunConfig) -> None:
    """Let a run continue PPO from its last checkpoint, for more steps, even if PPO has finished.

    Raises:
        CheckpointError: if PPO has finished, and no checkpoint of it is kept.
    """
    result = phase_result_path(run_dir, Phase.ppo)
    if result.exists() and not checkpoint_folders(run_dir / Phase.ppo):
        raise CheckpointError(
            f"resume={run_dir} ppo.steps={config.ppo.steps}: PPO has finished, and none of its "
            "checkpoints is kept (checkpoint.every_minutes, every_steps). Start a new run from the "
            f"policy: model=pretrained model.path={run_dir}/ppo/actor"
        )
    for path in (result, run_dir / RESULT):
        path.unlink(missing_ok=True)


def remove_stale_checkpoints(phase_dir: Path, *, last_step: int) -> None:
    """Remove unfinished checkpoint folders, and all checkpoints of steps after ``last_step``."""
    last = checkpoint_folder(phase_dir, last_step)
    for folder in find_entries(phase_dir / STATE, "*step-*"):
        if folder.name.startswith(".") or folder > last:
            remove(folder)


def find_latest_intact_checkpoint(
    phase_dir: Path, say: Callable[[str], None], ranks: Ranks = SINGLE_RANK
) -> Checkpoint | None:
    """Return the latest intact checkpoint, or None; ``say`` prints a warning if one is damaged."""
    for folder in ranks.all_gather(checkpoint_folders(phase_dir))[0]:
        try:
            return load_checkpoint(folder, ranks)
        except CheckpointError as error:
            say(f"warning: {error} The checkpoint is not used")
    return None


def load_checkpoint(folder: Path, ranks: Ranks = SINGLE_RANK) -> Checkpoint:
    """Return the checkpoint in ``folder``.

    Raises:
        CheckpointError: naming a file that is missing or damaged.
        CapabilityError: if a version with another format of states wrote it.
    """
    return ranks.together(lambda: _load_verified(folder, ranks))[0]


def _load_verified(folder: Path, ranks: Ranks) -> Checkpoint:
    """Return the checkpoint in ``folder`` if this rank's share of its files is intact."""
    manifest = folder / MANIFEST
    if (files := read_json(manifest, {OTHERS: [int, str]})) is None:
        raise CheckpointError(f"{manifest} is missing.")
    try:
        share = dict([*files.items()][ranks.rank :: ranks.size])
        check_files(folder, share, skip={MANIFEST, *files} - share.keys())
        state = read_json(folder / STATE_JSON, STATE_FORM, keeps_nan=True)
        checkpoint = Checkpoint(folder, state["step"], state)
        if folder != checkpoint_folder(folder.parents[1], checkpoint.step):
            raise CheckpointError(f"{folder} is of step {checkpoint.step}: it was renamed.")
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from error
    if (state_format := state.get("format", 1)) != STATE_FORMAT:
        # No CheckpointError: with that, the phase would begin again, without this checkpoint.
        raise CapabilityError(
            f"{folder} is a state of format {state_format}, and this version reads format "
            f"{STATE_FORMAT}: use the version that wrote it, rlhf {state.get('version', '0.1.0')}"
        )
    return checkpoint


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass
class BestStep:
    """A record of the best value of a metric so far, and of the evaluations since then."""

    metric: str | None  # None: checkpoint.best is no metric of this phase
    patience: int | None
    is_lower_better: bool = False
    value: float | None = None
    step: int | None = None  # step after which ``value`` was measured
    waits: int = 0  # evaluations since ``step``

    @classmethod
    def from_config(cls, config: CheckpointConfig, phase: Phase) -> BestStep:
        """Return the record before the first evaluation of ``phase``; it has no value yet."""
        if config.best is None or not config.best.startswith(f"{phase}/"):
            return cls(None, config.patience)
        return cls(config.best, config.patience, better_direction(config.best) == "lower")

    def update(
        self, values: Mapping[str, float], step: int, *, is_frozen: bool = False
    ) -> str | None:
        """Record the metrics after ``step``; return why the phase should stop early, or None.

        NaN is never the best. Evaluations while the policy ``is_frozen`` use up no patience.

        Raises:
            ConfigError: if ``values`` lacks the metric.
        """
        if self.metric is None:
            return None
        if self.metric not in values:
            raise ConfigError(
                f"checkpoint.best={self.metric}: this run does not measure it; use one of "
                f"{', '.join(values)}"
            )
        value = values[self.metric]
        sign = -1 if self.is_lower_better else 1
        is_better = self.value is None or sign * value > sign * self.value
        if is_better and not math.isnan(value):
            self.value, self.step, self.waits = value, step, 0
            return None
        self.waits += not is_frozen
        if self.patience is None or self.waits < self.patience:
            return None
        if self.value is None:
            return f"{self.metric} was never a number"
        return f"{self.metric} was best after step {self.step} ({self.value:.4g})"
