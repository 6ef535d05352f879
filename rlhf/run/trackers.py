"""Trackers, which record the metrics, samples, alarms and results of a run."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, cast

from rlhf.base.errors import CapabilityError, ConfigError, RlhfError
from rlhf.base.foreign_errors import require_package, translate_errors
from rlhf.base.stored_files import ALARMS, LINE, METRICS, SAMPLES, find_entries, read_json_lines
from rlhf.config.choices import Dtype, WandbMode
from rlhf.config.run_dir import SWEEPS
from rlhf.config.schema.run import AlarmsConfig, RunConfig
from rlhf.config.typed import flatten_keys
from rlhf.options import Backend
from rlhf.run.finished_phase import iterate_metrics
from rlhf.run.jsonl import OPTIONS_LOGS, JsonlWriter
from rlhf.run.metric_table import PANELS, describe_undocumented_metric
from rlhf.run.step_alarms import Alarm, AlarmRules
from rlhf.run.tracker import LONG_CALL, Sample, Token, Tracker


class TensorBoardTracker(Tracker):
    """A tracker that writes metrics, samples and hyper-parameters to event files of TensorBoard.

    A resumed run repeats steps after its checkpoint; steps in the event files are not added again.
    """

    skips_repeats = True

    def __init__(self, folder: Path, run_config: Mapping[str, Any]) -> None:
        """Open the event file.

        Raises:
            CapabilityError: if the package tensorboard is not installed.
        """
        way_out = "pip install 'rlhf[tensorboard]', or use tracking=local"
        with require_package("tracking.tensorboard=true", "tensorboard", way_out):
            from torch.utils.tensorboard import SummaryWriter
        self._written = _last_step_by_tag(folder)
        self._writer = SummaryWriter(str(folder))
        # The tab Custom Scalars has the report's charts in their order.
        layout = {
            section: {panel.title: ["Multiline", [*panel.metrics]] for panel in panels}
            for section, panels in PANELS.items()
        }
        self._writer.add_custom_scalars(layout)
        self._config = run_config

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002 - metric names begin with the phase
        """Write the metrics of one step, except those that the event files have already."""
        for name, value in drop_logged_metrics(values, step, self._written).items():
            self._writer.add_scalar(name, value, step)

    def samples(self, phase: str, step: int, samples: Sequence[Sample], *, steps: int) -> None:  # noqa: ARG002 - Tracker requires it
        """Write all responses as one text."""
        if step > self._written.get(f"{phase}/samples/text_summary", -1):
            self._writer.add_text(f"{phase}/samples", format_samples(samples), step)

    def histograms(self, phase: str, step: int, numbers: Mapping[str, Sequence[float]]) -> None:
        """Write histograms, except those that the event files have already."""
        import torch

        for name, values in numbers.items():
            if step > self._written.get(tag := f"{phase}/histograms/{name}", -1):
                self._writer.add_histogram(tag, torch.tensor(values), step)

    def conclude(self, result: Mapping[str, Any]) -> None:
        """Write the hyper-parameters and the objective."""
        parameters = {
            key: value if isinstance(value, bool | int | float) else str(value)
            for key, value in flatten_keys(self._config).items()
            if value != {}
        }
        self._writer.add_hparams(parameters, {"objective": result["objective"]}, run_name=".")

    def finish(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def _last_step_by_tag(folder: Path) -> dict[str, int]:
    """Return the last step of every tag in the event files of a folder."""
    if not folder.is_dir():
        return {}
    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

    sizes = {"scalars": 1, "tensors": 1, "histograms": 1}  # keep only the last event of each tag
    last: dict[str, int] = {}
    # File names contain times, but the clock may have been set back.
    for path in find_entries(folder, "*tfevents*"):
        events = event_accumulator.EventAccumulator(str(path), sizes).Reload()
        for kind in sizes:
            read = getattr(events, kind.title())
            last |= {tag: max(read(tag)[-1].step, last.get(tag, -1)) for tag in events.Tags()[kind]}
    return last


def drop_logged_metrics(
    values: Mapping[str, float], step: int, last: Mapping[str, int]
) -> dict[str, float]:
    """Return the metrics of ``step`` that ``last`` does not have for this or a later step."""
    return {name: value for name, value in values.items() if step > last.get(name, -1)}


def format_samples(samples: Sequence[Sample]) -> str:
    """Return all responses as one Markdown text."""
    return "\n\n".join(
        f"{each.model}, score {each.score:.2f}, KL {each.kl:.2f}\n\n"
        # Indented lines are shown unchanged: text of a model is not markup.
        + "\n".join(f"    {line}" for line in (each.prompt + each.response).splitlines())
        for each in samples
    )


class StoppedByAlarmError(RlhfError):
    """The error that ends a run when an alarm in alarms.stop is raised."""

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(f"{alarm.line} The run ends because alarms.stop has {alarm.name}")
        self.alarm = alarm


class IsolatedTracker:
    """A tracker that a daemon thread of its own makes and calls, so that it cannot hang the run."""

    def __init__(self, build: Callable[[], Tracker], seconds: float) -> None:
        """Build the tracker; raise its error, or TimeoutError. ``seconds`` limits each call."""
        self._seconds, self._calls = seconds, SimpleQueue[tuple[Callable[[], Any], Future[Any]]]()
        Thread(target=self._run_calls, daemon=True).start()
        self.tracker: Tracker = self._await(build, LONG_CALL * seconds)

    def call(self, function: Callable[[Tracker], object], *, is_end: bool = False) -> None:
        """Call ``function`` with the tracker; raise its error, or TimeoutError."""
        self._await(partial(function, self.tracker), self._seconds * (LONG_CALL if is_end else 1))

    def _await(self, function: Callable[[], Any], seconds: float) -> Any:
        future = Future[Any]()
        self._calls.put((function, future))
        if not wait([future], seconds).done:
            raise TimeoutError(f"tracking.timeout_seconds: no answer in {seconds:g} s")
        return future.result()

    def _run_calls(self) -> None:
        while True:
            function, future = self._calls.get()
            try:
                future.set_result(function())
            except BaseException as error:  # a user's tracker may raise anything
                future.set_exception(error)


class Trackers(Tracker):
    """A tracker that forwards all calls to other trackers, and raises alarms on wrong metrics.

    Once a tracker in ``others`` has failed or taken too long, it is not called again: training must
    not stop.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        alarms: AlarmsConfig,
        say: Callable[[str], None],
        others: Mapping[str, IsolatedTracker],
        *,
        is_fp32: bool = False,
    ) -> None:
        self._trackers = trackers
        self._others = dict(others)
        self._rules = AlarmRules(alarms.mute, is_fp32=is_fp32)
        self._stop = alarms.stop
        self._say = say
        self._logged: set[str] = set()

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of one step, and the alarms that they raise.

        Raises:
            StoppedByAlarmError: if alarms.stop has one of the alarms.
        """
        for name in sorted(values.keys() - self._logged):
            if problem := describe_undocumented_metric(name):
                self._say(f"warning: {problem}. It is logged without a description")
        self._logged |= values.keys()
        self._call_each_tracker(lambda tracker: tracker.log(phase, step, values))
        alarms = self._rules.check(phase, step, values)
        for alarm in alarms:
            self.alert(alarm)
        for alarm in alarms:
            if alarm.name in self._stop:
                raise StoppedByAlarmError(alarm)

    def samples(self, phase: str, step: int, samples: Sequence[Sample], *, steps: int) -> None:
        """Forward responses."""
        self._call_each_tracker(lambda tracker: tracker.samples(phase, step, samples, steps=steps))

    def alert(self, alarm: Alarm) -> None:
        """Print an alarm as one line, and forward it."""
        self._say(alarm.line)
        self._call_each_tracker(lambda tracker: tracker.alert(alarm))

    def append(self, log: str, phase: str, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Forward lines of an option's log."""
        self._call_each_tracker(lambda tracker: tracker.append(log, phase, step, lines))

    def histograms(self, phase: str, step: int, numbers: Mapping[str, Sequence[float]]) -> None:
        """Forward numbers whose distributions trackers record."""
        self._call_each_tracker(lambda tracker: tracker.histograms(phase, step, numbers))

    def conclude(self, result: Mapping[str, Any]) -> None:
        """Forward the content of result.json."""
        self._call_each_tracker(lambda tracker: tracker.conclude(result), is_end=True)

    def finish(self) -> None:
        """Close all trackers."""
        self._call_each_tracker(lambda tracker: tracker.finish(), is_end=True)

    def repeat_logs(self, run_dir: Path, ppo_steps: int | None) -> None:
        """Send what earlier attempts logged to alarm rules, and to trackers that skip repeats."""
        for phase, step, values in iterate_metrics(run_dir):
            self._rules.check(phase, step, values)
        repeat = partial(_repeat_logs, run_dir=run_dir, ppo_steps=ppo_steps)
        self._call_each_tracker(repeat, is_end=True)

    def _call_each_tracker(self, call: Callable[[Tracker], None], *, is_end: bool = False) -> None:
        for name, tracker in list(self._others.items()):
            try:
                tracker.call(call, is_end=is_end)
            except (Exception, SystemExit) as error:
                del self._others[name]
                self._say(
                    f"warning: {name} failed ({type(error).__name__}: {error}). The run "
                    "continues without it; metrics.jsonl and samples.jsonl have everything"
                )
        # Files are written last: a step in metrics.jsonl has been sent to every other tracker.
        for each in self._trackers:
            call(each)


def _repeat_logs(tracker: Tracker, run_dir: Path, ppo_steps: int | None) -> None:
    """Send all lines of a run's logs, except alarms, to ``tracker`` if it skips repeats."""
    if not tracker.skips_repeats:
        return
    of_step = itemgetter("phase", "step")
    for (phase, step), group in groupby(SAMPLES.read_lines(run_dir), of_step):
        tracker.samples(phase, step, [*map(_read_sample, group)], steps=ppo_steps or step)
    for log in OPTIONS_LOGS:
        for (phase, step), group in groupby(read_json_lines(run_dir / log, LINE), of_step):
            tracker.append(log, phase, step, list(group))
    for phase, step, values in iterate_metrics(run_dir):
        tracker.log(phase, step, values)


def _read_sample(line: Mapping[str, Any]) -> Sample:
    """Return the sample of a line of samples.jsonl; numbers that the line lacks are NaN."""
    score, kl = (math.nan if line.get(name) is None else line[name] for name in ("score", "kl"))
    tokens = [Token(text, *[math.nan] * 4) for text in line.get("token_texts", ())]
    parts = {"gold": line["gold"]} | line["gold_parts"] if "gold_parts" in line else None
    ended, model = line.get("ended", False), line.get("model", "actor")
    return Sample(line["prompt"], line["response"], ended, score, kl, tokens, parts, model=model)


class FileTracker(Tracker):
    """A tracker that writes the logs of a run directory, one JSON object per line."""

    def __init__(self, run_dir: Path, say: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._say = say
        self._writers: dict[str, JsonlWriter] = {}

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Append a line with the metrics of one step."""
        self._write(METRICS.name, {"phase": phase, "step": step, **values})

    def samples(self, phase: str, step: int, samples: Sequence[Sample], *, steps: int) -> None:  # noqa: ARG002 - Tracker requires it
        """Append a line per response."""
        for sample in samples:
            line = {"phase": phase, "step": step, **sample._asdict()}
            parts, tokens, turns = (line.pop(each) for each in ("gold_parts", "tokens", "messages"))
            if line["weights_step"] is None:
                del line["weights_step"]
            if turns is not None:
                line["turns"] = turns
            if parts is not None:
                line |= {"gold": parts["gold"]}
                line |= {"gold_parts": {k: v for k, v in parts.items() if k != "gold"}}
            line["token_texts"] = [token.text for token in tokens]
            for name in ("kl", "values", "advantages", "rewards"):
                numbers = [getattr(token, name.removesuffix("s")) for token in tokens]
                if None not in numbers:  # otherwise it was not computed
                    line[f"token_{name}"] = [round(number, 3) for number in numbers]
            self._write(SAMPLES.name, line)

    def alert(self, alarm: Alarm) -> None:
        """Append a line with the alarm."""
        self._write(ALARMS.name, alarm._asdict())

    def append(self, log: str, phase: str, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append the lines to the option's log."""
        for line in lines:
            self._write(log, {"phase": phase, "step": step, **line})

    def finish(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _write(self, name: str, line: Mapping[str, Any]) -> None:
        if name not in self._writers:
            self._writers[name] = JsonlWriter(self._run_dir / name)
        writer = self._writers[name]
        was_late = writer.is_late
        writer.write(line)
        if writer.is_late and not was_late:
            self._say(
                f"warning: the drive refused {self._run_dir / name} several times. The run "
                "continues; the lines are written when the drive accepts them"
            )


def build_tracker(
    config: RunConfig, run_dir: Path, *, is_main: bool, say: Callable[[str], None]
) -> Tracker:
    """Return the tracker of this rank; only the main rank records.

    ``say`` prints alarms, and warnings of trackers that failed.

    Raises:
        CapabilityError: if a tracker is configured but does not start.
        ConfigError: if a tracker in tracking.others cannot be imported.
    """
    if not is_main:
        return Tracker()
    builders: dict[str, Callable[[], Tracker]] = {}
    if config.tracking.wandb is not WandbMode.disabled:
        from rlhf.run.wandb_run import WandbTracker, save_views

        path = run_dir.resolve()
        is_job = path.parents[1].name == SWEEPS.name  # runs/sweeps/SWEEP/JOB
        builders["Weights & Biases"] = partial(
            WandbTracker,
            config.tracking,
            run_dir,
            asdict(config),
            name=path.name,
            group=path.parent.name if is_job else config.name,
            job_type="+".join(config.phase.order),
        )
    if config.tracking.tensorboard:
        folder = run_dir / "tensorboard"
        builders["TensorBoard"] = partial(TensorBoardTracker, folder, asdict(config))
    for target in config.tracking.others:
        builders[target] = partial(_import_tracker(target), config, run_dir)
    others: dict[str, IsolatedTracker] = {}
    for name, build in builders.items():
        with translate_errors(partial(_refuse_tracker, name)):
            others[name] = IsolatedTracker(build, config.tracking.timeout_seconds)
    if config.tracking.wandb is WandbMode.online:
        wandb_tracker = others["Weights & Biases"].tracker
        assert isinstance(wandb_tracker, WandbTracker)
        save_views(wandb_tracker.project_path, say)
    # A server chooses its own precision.
    is_fp32 = config.hardware.dtype is Dtype.fp32 and config.rollout.backend is Backend.fast
    trackers = Trackers([FileTracker(run_dir, say)], config.alarms, say, others, is_fp32=is_fp32)
    trackers.repeat_logs(run_dir, config.ppo.steps)
    return trackers


def _refuse_tracker(name: str, reason: str) -> CapabilityError:
    return CapabilityError(f"tracking: {name} does not start ({reason}); repair it or remove it")


def _import_tracker(target: str) -> Callable[[RunConfig, Path], Tracker]:
    """Return the class or function that ``target``, a package.module:NAME, names."""
    module, _, name = target.partition(":")
    try:
        tracker = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"tracking.others={target}: {error}; give package.module:NAME of a class that can be "
            "imported (PYTHONPATH), and that takes the configuration and the run directory"
        ) from error
    return cast("Callable[[RunConfig, Path], Tracker]", tracker)
