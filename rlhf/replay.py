"""Take steps of a run again, and compare them bit for bit with what the run has logged.

    python -m rlhf.replay RUN_DIR                          the last step
    python -m rlhf.replay RUN_DIR --phase ppo --step 37    one step

The replay runs in a separate folder. It begins at the last checkpoint before the step or,
without one, at the start of the phase. It ends at the next step with digests of the weights
(checkpoint.digest_every), if any. The exit code is 0 if all is equal, and 1 if something differs.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.command import build_command_parser, run_to_exit_code
from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.program import LAUNCHER
from rlhf.base.safe_text import sanitize_for_terminal
from rlhf.base.stored_files import DIGESTS, METRICS, copy_regular_files, read_bytes
from rlhf.config.choices import Phase
from rlhf.config.consent import require_consent
from rlhf.config.freeze import COMMAND, FROZEN, load_frozen_config
from rlhf.config.run_dir import find_run_dir, lock_run_dir
from rlhf.options.judges.keys import VERDICTS
from rlhf.run.finished_phase import copy_phase_lines, link_or_copy, link_phase, verify_phase
from rlhf.run.jsonl import LOGS
from rlhf.run.metric_table import varies_between_runs
from rlhf.run.phase_state import checkpoint_folder, checkpoint_folders, load_checkpoint
from rlhf.run.results import read_attempts, read_phase_result
from rlhf.runtime.phase_runs import describe_environment

DIFFERS = 1  # exit code if a value differs
MOST_SHOWN = 8  # most differing values that are printed


class Replay(NamedTuple):
    """The steps of a phase to take again: from ``start`` + 1 to ``end``, both included."""

    phase: Phase
    start: int
    end: int


class ReplayComparison(NamedTuple):
    """The comparison of the values that a run and its replay have logged for the same steps."""

    num_values: int
    """Number of compared values."""
    num_digests: int
    """Number of compared values that are digests of tensors."""
    step: int | None
    """The first step that differs; None if all are equal."""
    differing: Mapping[str, tuple[Any, Any]]
    """The values that differ at ``step``, by name: the run's value and the replay's value."""


def plan_replay(run_dir: Path, phase: Phase | None, step: int | None) -> Replay:
    """Return the steps to take again to check ``step`` of ``phase``; None stands for the last one.

    Raises:
        ConfigError: if the run has not logged the step, or reused the phase of another run.
    """
    order = load_frozen_config(run_dir).phase.order
    logged = read_logged_values(run_dir)
    phases = [name for name in order if name in logged]
    if not phases or (phase is not None and phase not in phases):
        names = ", ".join(phases) or "no phase"
        raise ConfigError(f"--phase {phase or order[0]}: {run_dir} has logged steps of {names}")
    phase = phase or phases[-1]
    result = read_phase_result(run_dir, phase) or {}
    if (source := result.get("reused_from")) is not None:
        raise ConfigError(f"--phase {phase}: {run_dir} took it from {source}; replay that run")
    last = max(logged[phase])
    step = last if step is None else step
    if not 1 <= step <= last:
        raise ConfigError(f"--step {step}: {phase} has the steps 1 to {last}")
    with_digests = (n for n, v in logged[phase].items() if any(map(is_digest, v.values())))
    kept = (int(path.name.rpartition("-")[2]) for path in checkpoint_folders(run_dir / phase))
    start = max((n for n in kept if n < step), default=0)
    return Replay(phase, start, min((n for n in with_digests if n >= step), default=step))


def copy_run_at_start_step(run_dir: Path, replay: Replay, target: Path) -> None:
    """Copy a run to ``target`` in the state that it had after the step ``replay.start``.

    Raises:
        CheckpointError: if an earlier phase, or the checkpoint at that step, is damaged.
    """
    phase, start, _ = replay
    order = load_frozen_config(run_dir).phase.order
    for name in (FROZEN, COMMAND, VERDICTS):
        if (content := read_bytes(run_dir / name)) is not None:
            (target / name).write_bytes(content)
    copy_regular_files(run_dir / "tokenizer", target / "tokenizer")
    earlier = order[: order.index(phase)]
    if start:
        checkpoint = load_checkpoint(checkpoint_folder(run_dir / phase, start))
        sizes = checkpoint.state["logs"]
        for name in sizes.keys() & LOGS:
            (target / name).write_bytes((read_bytes(run_dir / name) or b"")[: sizes[name]])
    else:
        for done, name in product(earlier, LOGS):
            copy_phase_lines(run_dir, done, target, name)
    for done in earlier:
        verify_phase(run_dir, done)
        link_phase(run_dir, done, target, reused_from=str(run_dir))
    if start:
        folder = checkpoint_folder(target / phase, start)
        copy_regular_files(checkpoint.folder, folder, copy_function=link_or_copy)


def resume_to_end_step(target: Path, replay: Replay) -> None:
    """Continue the run in ``target`` up to ``replay.end``; CheckpointError if it ends earlier."""
    stop = f"checkpoint.stop_after={replay.phase}/{replay.end}"
    overrides = (
        *("reuse.phases=never", "plan=off", "tracking.wandb=disabled"),
        *("tracking.tensorboard=false", "tracking.others=[]", "trust_run=true"),
    )
    command = [sys.executable, str(LAUNCHER), f"resume={target}", stop, *overrides]
    process = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if not checkpoint_folder(target / replay.phase, replay.end).is_dir():
        last_line = (process.stderr.splitlines() or ["no message"])[-1]
        raise CheckpointError(f"the replay ended before {stop.partition('=')[2]}: {last_line}")


def compare_logs(run_dir: Path, target: Path, replay: Replay) -> ReplayComparison:
    """Compare what a run and its replay in ``target`` have logged, up to the first difference.

    Raises:
        CheckpointError: if the replay asked a judge for verdicts that the run lacks.
    """
    if read_bytes(run_dir / VERDICTS) != read_bytes(target / VERDICTS):
        raise CheckpointError(f"{run_dir / VERDICTS} lacks verdicts that the steps need")
    logged = [read_logged_values(folder).get(replay.phase, {}) for folder in (run_dir, target)]
    num_values = num_digests = 0
    for step in range(replay.start + 1, replay.end + 1):
        of_run, of_replay = (by_step.get(step, {}) for by_step in logged)
        names = dict.fromkeys([*of_run, *of_replay])
        if step == replay.end:  # the replay stops here, before a final evaluation
            names = {name: None for name in names if name in of_replay or "/eval_" not in name}
        pairs = {name: (of_run.get(name), of_replay.get(name)) for name in names}
        num_values += len(pairs)
        num_digests += sum(is_digest(replayed) for _, replayed in pairs.values())
        differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if differing:
            return ReplayComparison(num_values, num_digests, step, differing)
    return ReplayComparison(num_values, num_digests, None, {})


def read_logged_values(run_dir: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the metrics, without timings, and the weight digests of a run, by phase and step."""
    logged: dict[str, dict[int, dict[str, Any]]] = {}
    for line in METRICS.read_lines(run_dir):
        steps = logged.setdefault(line.pop("phase"), {})
        kept = {name: value for name, value in line.items() if not varies_between_runs(name)}
        steps.setdefault(kept.pop("step"), {}).update(kept)
    for line in DIGESTS.read_lines(run_dir):
        logged.setdefault(line["phase"], {}).setdefault(line["step"], {}).update(line["weights"])
    return logged


def is_digest(value: object) -> bool:
    """Return True if a logged value is the digest of a tensor, and not a metric."""
    return isinstance(value, str)


def describe_comparison(comparison: ReplayComparison, replay: Replay) -> Iterator[str]:
    """Yield lines to print: that all steps are equal, or the first step that differs."""
    steps = f"{replay.phase} steps {replay.start + 1} to {replay.end}"
    if comparison.step is None:
        compared = f"{comparison.num_values} values, {comparison.num_digests} of them tensors"
        yield f"{steps} are equal bit for bit: {compared} of weights"
        if not comparison.num_digests:
            yield (
                "no weights were compared: the run has no digests; start a run with "
                "checkpoint.digest_every=10 to write them"
            )
        return
    count = len(comparison.differing)
    yield f"{steps}: step {comparison.step} is the first that differs; differing values: {count}"
    for name, (original, replayed) in list(comparison.differing.items())[:MOST_SHOWN]:
        yield f"  {name}: {original} in the run, {replayed} in the replay"
    if count > MOST_SHOWN:
        yield f"  and {count - MOST_SHOWN} more"


def describe_other_machine(run_dir: Path) -> Iterator[str]:
    """Yield a line for each property of machine or code that differs between run and replay."""
    present = describe_environment(load_frozen_config(run_dir))
    if not (attempts := read_attempts(run_dir)):
        yield "the run is from an older version, which did not record the machine"
    originals = {item for attempt in attempts for item in attempt["environment"].items()}
    for name, value in sorted(originals - present.items()):
        yield f"the run was computed with {name} {value}, the replay with {present.get(name)}"


def take_steps_again(run_dir: Path, replay: Replay, target: Path) -> ReplayComparison:
    """Take the steps again in ``target``, and compare them with the run."""
    with lock_run_dir(run_dir):  # without the lock, a running job may remove the checkpoint
        copy_run_at_start_step(run_dir, replay, target)
    resume_to_end_step(target, replay)
    return compare_logs(run_dir, target, replay)


def main(arguments: Sequence[str]) -> int:
    """Replay the steps that the command names; return the exit code."""
    parser = build_command_parser("rlhf.replay", __doc__, uses_run=True)
    parser.add_argument("run_dir", nargs="?", help="default: runs/latest")
    parser.add_argument("--phase", type=Phase, choices=list(Phase), help="default: the last phase")
    parser.add_argument("--step", type=int, help="default: the last step")
    parser.add_argument("--folder", type=Path, help="new folder that keeps the replayed run")
    options = parser.parse_args(arguments)
    return run_to_exit_code(lambda: _replay(options))


def _replay(options: argparse.Namespace) -> int:
    run_dir = find_run_dir(options.run_dir).resolve()
    require_consent(run_dir, is_given=options.trust_run)
    replay = plan_replay(run_dir, options.phase, options.step)
    with create_replay_folder(options.folder, beside=run_dir) as target:
        comparison = take_steps_again(run_dir, replay, target)
    for line in [*describe_comparison(comparison, replay), *describe_other_machine(run_dir)]:
        sys.stdout.write(f"{sanitize_for_terminal(line)}\n")
    return 0 if comparison.step is None else DIFFERS


@contextmanager
def create_replay_folder(folder: Path | None, *, beside: Path) -> Iterator[Path]:
    """Create and yield ``folder`` or, if it is None, a temporary folder beside ``beside``.

    SIGTERM then ends the process as an error does, so that the temporary folder is removed.
    """
    if folder is None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        with tempfile.TemporaryDirectory(prefix=".replay-", dir=beside.parent) as temporary:
            yield Path(temporary)
        return
    if folder.exists():
        raise ConfigError(f"--folder {folder}: it exists; name a new folder")
    folder.mkdir(parents=True)
    yield folder.resolve()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
