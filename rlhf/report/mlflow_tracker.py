"""Track a run with MLflow: ``python launch.py tracking=mlflow``.

MLflow stores the run at MLFLOW_TRACKING_URI, or else in mlflow.db and mlruns of the current folder.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf.base.foreign_errors import require_package
from rlhf.base.stored_files import RESULT, read_stored_text
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import flatten_keys
from rlhf.run.step_alarms import Alarm
from rlhf.run.tracker import Sample, Tracker
from rlhf.run.trackers import drop_logged_metrics, format_samples

MOST_PARAMS, LONGEST_PARAM = 100, 6000  # parameters of one call, characters of a parameter


class MlflowTracker(Tracker):
    """A tracker that writes one MLflow run per run directory, and continues it on resume."""

    skips_repeats = True

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        """Start an MLflow run, or continue the run whose id is in RUN_DIR/mlflow_id.

        Raises:
            CapabilityError: if the package mlflow is not installed.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        way_out = "pip install 'rlhf[mlflow]', or use tracking=local"
        with require_package("tracking=mlflow", "mlflow", way_out):
            from mlflow.tracking import MlflowClient
        logging.getLogger("alembic").setLevel(logging.WARNING)  # it logs each new table
        self._client, self._is_concluded = MlflowClient(), False
        self._logged: dict[str, int] = {}
        id_file = run_dir / "mlflow_id"
        if (stored := read_stored_text(id_file)) is None:
            self._id = self._start_run(config, run_dir.resolve())
            id_file.write_text(self._id + "\n")
        else:
            self._id = stored.strip()
            self._client.set_terminated(self._id, "RUNNING")
            for name in self._client.get_run(self._id).data.metrics:
                history = self._client.get_metric_history(self._id, name)
                self._logged[name] = max(point.step for point in history)

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002 - metric names begin with the phase
        """Write the metrics of a step, except metrics that MLflow has already."""
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        new = drop_logged_metrics(values, step, self._logged)
        if metrics := [Metric(name, value, now, step) for name, value in new.items()]:
            self._client.log_batch(self._id, metrics=metrics)

    def samples(self, phase: str, step: int, samples: Sequence[Sample], *, steps: int) -> None:  # noqa: ARG002 - Tracker requires it
        """Write all samples of a step as one Markdown file."""
        name = f"samples/{phase}_{step:06}.md"
        self._client.log_text(self._id, format_samples(samples), name)

    def alert(self, alarm: Alarm) -> None:
        """Set a tag with the text of an alarm."""
        self._client.set_tag(self._id, f"alarm.{alarm.phase}.{alarm.name}", alarm.line)

    def conclude(self, result: Mapping[str, Any]) -> None:
        """Write the objective as a metric, and the result as a file."""
        self._client.log_metric(self._id, "objective", result["objective"])
        self._client.log_dict(self._id, dict(result), RESULT.name)
        self._is_concluded = True

    def finish(self) -> None:
        """End the MLflow run, as killed if it has no result."""
        self._client.set_terminated(self._id, "FINISHED" if self._is_concluded else "KILLED")

    def _start_run(self, config: RunConfig, run_dir: Path) -> str:
        """Start an MLflow run with the configuration as its parameters; return its id."""
        from mlflow.entities import Param

        project = config.tracking.project
        if (experiment := self._client.get_experiment_by_name(project)) is None:
            experiment_id = self._client.create_experiment(project)
        else:
            experiment_id = experiment.experiment_id
        tags = {"run_dir": str(run_dir), "phases": "+".join(config.phase.order)}
        tags |= {"group": config.name} | dict.fromkeys(config.tracking.tags, "true")
        run = self._client.create_run(experiment_id, run_name=run_dir.name, tags=tags)
        run_id: str = run.info.run_id
        keys = flatten_keys(asdict(config))
        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in keys.items()]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(run_id, params=params[start : start + MOST_PARAMS])
        return run_id
