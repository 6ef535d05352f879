"""Track a run with Trackio: ``python launch.py tracking=trackio``.

Trackio stores the run in TRACKIO_DIR (default: the cache of Hugging Face), or sends it to the Space
TRACKIO_SPACE_ID or the server TRACKIO_SERVER_URL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

from rlhf.base.foreign_errors import require_package
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import flatten_keys
from rlhf.run.step_alarms import Alarm
from rlhf.run.tracker import Sample, Tracker
from rlhf.run.trackers import drop_logged_metrics, format_samples


class TrackioTracker(Tracker):
    """A tracker that writes one Trackio run per run directory, and continues it on resume.

    Steps that a resumed run repeats are written once if Trackio stores them on this machine.
    """

    skips_repeats = True

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        """Start a Trackio run with the last two parts of ``run_dir`` as its name, or continue it.

        Raises:
            CapabilityError: if the package trackio is not installed.
        """
        way_out = "pip install 'rlhf[trackio]', or use tracking=local"
        with require_package("tracking=trackio", "trackio", way_out):
            import trackio
            from trackio.sqlite_storage import SQLiteStorage
        folder, project = run_dir.resolve(), config.tracking.project
        name = f"{folder.parent.name}/{folder.name}"
        self._logged: dict[str, int] = {}
        for line in SQLiteStorage.get_logs(project, name):
            for metric in line:
                self._logged[metric] = max(line["step"], self._logged.get(metric, 0))
        with redirect_stdout(StringIO()):  # init prints how to open the dashboard
            self._run = trackio.init(
                project=project,
                name=name,
                group=config.name,
                config=flatten_keys(asdict(config)),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002 - metric names begin with the phase
        """Write the metrics of a step, except metrics that are stored already."""
        if new := drop_logged_metrics(values, step, self._logged):
            self._run.log(new, step=step)

    def samples(self, phase: str, step: int, samples: Sequence[Sample], *, steps: int) -> None:  # noqa: ARG002 - Tracker requires it
        """Write all samples of a step as one Markdown text."""
        import trackio

        if step > self._logged.get(name := f"{phase}/samples", -1):
            self._run.log({name: trackio.Markdown(format_samples(samples))}, step=step)

    def histograms(self, phase: str, step: int, numbers: Mapping[str, Sequence[float]]) -> None:
        """Write histograms, except those that are stored already."""
        import trackio

        shown = {f"{phase}/histograms/{name}": numbers[name] for name in numbers}
        new = {n: each for n, each in shown.items() if step > self._logged.get(n, -1)}
        if new:
            self._run.log({n: trackio.Histogram(each) for n, each in new.items()}, step=step)

    def alert(self, alarm: Alarm) -> None:
        """Send an alarm as an alert, which Trackio forwards as its user has configured."""
        self._run.alert(title=f"{alarm.name} in {alarm.phase}", text=alarm.line)

    def conclude(self, result: Mapping[str, Any]) -> None:
        """Write the objective as a metric."""
        self._run.log({"objective": result["objective"]})

    def finish(self) -> None:
        """Store the remaining data and end the run."""
        import trackio

        with redirect_stdout(StringIO()):
            trackio.finish()
