"""Search hyper-parameters with Optuna: every trial is a run, in a separate process.

An Optuna study chooses the values of each trial. Its file, in the folder of the search, stores the
results of the trials. The same command again continues the study: it resumes trials that were
running when the search was killed, and repeats no finished trial.
"""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import FileLock, Timeout

from rlhf.base.atomic import replace_atomically
from rlhf.base.errors import CapabilityError, ConfigError
from rlhf.base.finite_numbers import restore_nan
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.stored_files import (
    METRICS,
    RESULT,
    DamagedFileError,
    GrowingFile,
    read_bytes,
    read_json_lines_with_bytes,
    read_json_object,
)
from rlhf.config.freeze import FROZEN
from rlhf.config.schema.hardware import HardwareConfig
from rlhf.jobs.search_command import (
    Dimension,
    Sampler,
    Search,
    compose_example_config,
    trial_value_text,
    write_solutions,
)
from rlhf.jobs.sweep_command import job_folder_name
from rlhf.jobs.sweep_jobs import OUTPUT, resources_of_share, start_process, use_cores
from rlhf.run.console import Console
from rlhf.run.metric_table import better_direction
from rlhf.run.step_alarms import read_alarms
from rlhf.runtime.start_checks import logged_metric_names, require_known_name, result_names

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

JOURNAL = "study.journal"
POLL_SECONDS = 0.5
GRACE_SECONDS = 30.0


class RunningTrial(NamedTuple):
    """A running trial: its slot (its share of the machine), its process and its run directory."""

    trial: Trial
    slot: int
    process: subprocess.Popen[bytes]
    run_dir: Path
    metrics: GrowingFile


class Searcher:
    """The runner of a search, with its Optuna study and the processes of its trials."""

    def __init__(
        self, search: Search, hardware: HardwareConfig, script: str, say: Callable[[str], None]
    ) -> None:
        """Lock the folder of the search, and open or create the study in it.

        Raises:
            CapabilityError: if Optuna is not installed.
            ConfigError: if another process runs this search.
        """
        self._search, self._hardware, self._script, self._say = search, hardware, script, say
        self._lock = FileLock(search.folder / "study.lock")
        search.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(blocking=False)
        except Timeout as error:
            raise ConfigError(f"{search.folder}: another process runs this search") from error
        self._study = open_study(search)
        self._running: list[RunningTrial] = []

    def run(self) -> None:
        """Resume unfinished trials, run new ones up to ``study.trials``, write the best trials."""
        from optuna.trial import Trial, TrialState

        try:
            for frozen in self._study.get_trials(states=[TrialState.RUNNING]):
                self._wait_for_slot()
                self._start_trial(Trial(self._study, frozen._trial_id))
            while len(self._study.trials) < self._search.study.trials:
                self._wait_for_slot()
                self._start_trial(self._study.ask())
            while self._running:
                self._poll_trials()
        finally:
            for running in self._running:
                _end_process(running.process)
            write_solutions(self._search, self._study.best_trials)
            self._lock.release()

    def _wait_for_slot(self) -> None:
        while len(self._running) == self._search.study.slots:
            self._poll_trials()

    def _start_trial(self, trial: Trial) -> None:
        """Start the process of a trial, or resume its run."""
        for dimension in self._search.space:  # a trial of a killed search may lack values
            _suggest_value(trial, dimension)
        values = [f"{d.key}={trial_value_text(trial.params[d.key])}" for d in self._search.space]
        name = job_folder_name(",".join([f"{trial.number:03d}", *values]))
        run_dir = self._search.folder / name
        if (run_dir / FROZEN).exists():
            words = [f"resume={run_dir}"]
        else:
            shutil.rmtree(run_dir, ignore_errors=True)  # the trial was killed before its run began
            stop_on = ",".join(self._search.study.stop_on)
            words = [*self._search.fixed, *values, f"run_dir={run_dir}"]
            words += [f"alarms.stop=[{stop_on}]"] if stop_on else []
            if not any(word.startswith("reuse.phases=") for word in words):
                words.append("reuse.phases=always")
        run_dir.mkdir(parents=True, exist_ok=True)
        slot = min({*range(self._search.study.slots)} - {running.slot for running in self._running})
        environment, cores = resources_of_share(self._hardware, slot, self._search.study.slots)
        with use_cores(cores):
            process = start_process(self._script, words, run_dir, environment)
        self._say(f"trial {trial.number}: {' '.join(values)}")
        self._running.append(RunningTrial(trial, slot, process, run_dir, METRICS.follow(run_dir)))

    def _poll_trials(self) -> None:
        """Wait ``POLL_SECONDS``; report ended trials to the study, and end pruned trials."""
        time.sleep(POLL_SECONDS)
        for running in list(self._running):
            if running.process.poll() is None:
                if self._search.study.prune is not None and self._report_and_check_pruning(running):
                    _end_process(running.process)
                    self._report_no_result(running, "pruned", "ended early")
            elif running.process.returncode == 0:
                self._report_result(running)
            elif any(a.name in self._search.study.stop_on for a in read_alarms(running.run_dir)):
                self._report_no_result(running, "pruned", "ended early")
            else:
                self._report_no_result(running, "failed", f"exit code {running.process.returncode}")

    def _report_and_check_pruning(self, running: RunningTrial) -> bool:
        """Report new values of the pruning metric to the study; return True to end the trial."""
        prune = self._search.study.prune
        assert prune is not None
        reported = self._study.trials[running.trial.number].intermediate_values
        # Optuna assumes the objective's direction: negate a metric whose better direction differs.
        goal = "higher" if self._search.study.maximize else "lower"
        sign = 1 if better_direction(prune.metric) in {None, goal} else -1
        for line in running.metrics.read().values:
            value, step = line.get(prune.metric), line["step"]
            if value is not None and step not in reported:
                running.trial.report(sign * value, step)
        return bool(running.trial.should_prune())

    def _report_result(self, running: RunningTrial) -> None:
        """Report the measures of a finished trial to the study; it fails if one is not finite."""
        phases, study = read_json_object(running.run_dir / RESULT)["phases"], self._search.study
        values = [_read_result(phases, name) for name in study.objectives]
        limited = {name: _read_result(phases, name) for name in study.at_most}
        if not all(map(isfinite, [*values, *limited.values()])):
            self._report_no_result(running, "failed", "a measure of the study is not finite")
            return
        for name, limit in study.at_most.items():
            running.trial.set_constraint(name, limited[name] - limit)
        self._running.remove(running)
        self._study.tell(running.trial, values)
        pairs = zip(study.objectives, values, strict=True)
        self._say(f"trial {running.trial.number}: " + ", ".join(f"{n} {v:.4g}" for n, v in pairs))

    def _report_no_result(self, running: RunningTrial, outcome: str, reason: str) -> None:
        """Report to the study that a trial was ``pruned`` or has ``failed``."""
        from optuna.trial import TrialState

        self._running.remove(running)
        state = TrialState.PRUNED if outcome == "pruned" else TrialState.FAIL
        self._study.tell(running.trial, state=state)
        output = running.run_dir / OUTPUT
        self._say(f"trial {running.trial.number}: {outcome}, {reason}; its output is in {output}")


def run_search(search: Search, conf: Path, script: str) -> None:
    """Check the search with one configuration composed from ``conf``, then run all trials."""
    config, study = compose_example_config(search, conf), search.study
    for name in [*study.objectives, *study.at_most]:
        require_known_name("study", name, result_names(config))
    if study.prune is not None:
        require_known_name("study.prune.metric", study.prune.metric, logged_metric_names(config))
    console = Console()
    console.say(f"search in {search.folder}: {search.study.trials} trials")
    Searcher(search, config.hardware, script, console.say).run()


def open_study(search: Search) -> Study:
    """Load the study in the folder of the search, or create it, and return it.

    Raises:
        CapabilityError: if Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise CapabilityError(
            "a search needs the package optuna: pip install 'rlhf[sweep]'"
        ) from error
    from optuna.storages.journal import JournalFileBackend, JournalStorage
    from optuna.study import StudyDirection

    optuna.logging.set_verbosity(logging.WARNING)
    config = search.study
    kinds = {Sampler.tpe: optuna.samplers.TPESampler, Sampler.random: optuna.samplers.RandomSampler}
    journal = search.folder / JOURNAL
    repair_journal(journal)
    with translate_errors(partial(DamagedFileError, journal)):
        study = optuna.create_study(
            study_name=search.folder.name,
            storage=JournalStorage(JournalFileBackend(str(journal))),
            directions=[
                *(StudyDirection.MAXIMIZE for _ in config.maximize),
                *(StudyDirection.MINIMIZE for _ in config.minimize),
            ],
            load_if_exists=True,
        )
    # With the same seed, a continued study would draw the values of its first trials again.
    study.sampler = kinds[config.sampler](seed=config.seed + len(study.trials))
    if config.prune is not None:
        study.pruner = optuna.pruners.MedianPruner(
            n_startup_trials=config.prune.after_trials, n_warmup_steps=config.prune.after_step
        )
    return study


def repair_journal(path: Path) -> None:
    """Remove what a killed search left: the journal's incomplete last line, and Optuna's lock.

    The caller holds the lock of the study. Optuna would append its next line to the incomplete one.
    Optuna's lock is a link to a relative path, and Optuna releases an old lock only if the link's
    target exists.

    Raises:
        DamagedFileError: if the journal is no regular file, or another line is no JSON object.
    """
    path.with_name(path.name + ".lock").unlink(missing_ok=True)
    if (content := read_bytes(path)) is None:
        return
    whole = b"".join(line + b"\n" for line, _ in read_json_lines_with_bytes(path, {"op_code": int}))
    if whole != content:
        with replace_atomically(path) as building:
            building.write_bytes(whole)


def _suggest_value(trial: Trial, dimension: Dimension) -> None:
    if dimension.choices:
        trial.suggest_categorical(dimension.key, dimension.choices)
    elif dimension.is_integer:
        low, high = int(dimension.low), int(dimension.high)
        trial.suggest_int(dimension.key, low, high, log=dimension.is_log)
    else:
        trial.suggest_float(dimension.key, dimension.low, dimension.high, log=dimension.is_log)


def _read_result(phases: Mapping[str, Any], name: str) -> float:
    """Return the result ``name``, which has the form PHASE.NAME, of a run's ``phases``.

    Raises:
        ConfigError: if the phase has no such result.
    """
    phase, _, measure = name.partition(".")
    try:
        return float(restore_nan(phases[phase])[measure])
    except (KeyError, TypeError) as error:
        known = sorted(n for n, v in phases.get(phase, {}).items() if isinstance(v, int | float))
        listed = ", ".join(known) or f"the phases {', '.join(phases)}"
        raise ConfigError(f"study: runs have no result {name}; they have {listed}") from error


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT, as Ctrl-C does, and wait; kill the process after ``GRACE_SECONDS``."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
