"""A run in Weights & Biases: one W&B run per run directory."""

from __future__ import annotations

import json
import os
import re
import secrets
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from rlhf.base.errors import CapabilityError
from rlhf.base.hashing import sha256_of
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.program import name_commands
from rlhf.base.stored_files import (
    MANIFEST,
    DamagedFileError,
    find_files,
    read_bytes,
    read_stored_text,
)
from rlhf.config.choices import Phase, Source, WandbMode
from rlhf.config.schema.run import TrackingConfig
from rlhf.run.step_alarms import Alarm
from rlhf.run.tracker import LONG_CALL, Sample, Tracker

if TYPE_CHECKING:
    import wandb

INIT_TIMEOUT_SECONDS = 30.0
INIT_ATTEMPTS = 3
VIEWS_COMMAND = "python -m rlhf.report.dashboards"
INSTALL_VIEWS = "pip install 'rlhf[dashboards]' && "
VIEWS_SECONDS = 300  # limit of the process that saves the views
MOST_INCREMENTS = 99  # a run's page shows the latest 100 increments of a table
# After a header of seven bytes, an offline run's file has the format of LevelDB's log:
# https://github.com/google/leveldb/blob/main/doc/log_format.md. Its records are protocol buffers.
BLOCK, FILE_HEADER, HEADER = 32768, 7, 7  # bytes
FULL, LAST = 1, 4  # kinds of chunks that complete a record
OFFLINE_FILES = "wandb/offline-run-*/run-*.wandb"  # one per attempt, in their order

# Prefixes of the metrics of each phase; only PPO logs metrics with other prefixes than its own.
PREFIXES: dict[Phase, tuple[str, ...]] = {phase: (phase.value,) for phase in Phase}
PREFIXES[Phase.ppo] += ("time", "speed", "memory", "rollout")

SUMMARIES: Mapping[str, str] = read_yaml_beside(__file__, "wandb_summaries.yaml")

PARTS = ("samples", "eval_", "histograms")  # what a phase sends separately from a step's metrics


class WandbTracker(Tracker):
    """A tracker that sends a run to Weights & Biases, or stores it in ``run_dir/wandb``.

    Each phase has its own x axis, ``<phase>/step``. A resumed run repeats steps of the phase that
    was stopped; steps that W&B has already are not sent again.
    """

    skips_repeats = True

    def __init__(
        self, config: TrackingConfig, run_dir: Path, run_config: dict[str, Any], **names: str
    ) -> None:
        """Start or resume the run; ``names`` are its name, group and job_type.

        Raises:
            CapabilityError: if mode online lacks credentials, or the server cannot be reached.
        """
        from wandb.errors import Error

        cut_incomplete_records(run_dir)
        try:
            _require_login(config.wandb)
            self._run = _start_run(config, run_dir, run_config, names)
        except Error as error:
            raise CapabilityError(
                f"tracking.wandb={config.wandb}: Weights & Biases refused: {error}. "
                "Check the network and `wandb login --verify`, or use tracking=wandb_offline."
            ) from error
        self._run_dir, self._uploads = run_dir.resolve(), config.upload
        if config.wandb is WandbMode.online:  # W&B accepts use_artifact in online runs only
            self._run.use_artifact(_build_data_artifact(run_config["data"]))
        self._sent = self._last_sent_steps(run_dir, is_offline=config.wandb is WandbMode.offline)
        self._tables: dict[str, wandb.Table] = {}
        self._first: dict[str, str] = {}  # prompts and their responses before training
        self._increment = -1
        for phase, prefixes in PREFIXES.items():
            self._run.define_metric(f"{phase}/step")
            for prefix in prefixes:
                self._run.define_metric(f"{prefix}/*", step_metric=f"{phase}/step")
        for metric, summary in SUMMARIES.items():
            step = f"{phase_of_metric(metric)}/step"
            self._run.define_metric(metric, step_metric=step, summary=summary)

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of one step, unless W&B has them already."""
        if step > self._sent.get(_common_prefix(phase, values), -1):
            self._run.log({**values, f"{phase}/step": step})

    def samples(self, phase: str, step: int, samples: Sequence[Sample], *, steps: int) -> None:
        """Add responses to the table of samples, at most ``MOST_INCREMENTS`` times after step 0."""
        if step == 0:
            self._first = {sample.prompt: sample.response for sample in samples}
        key, increment = f"{phase}/samples", MOST_INCREMENTS * step // max(steps, 1)
        is_shown, self._increment = increment != self._increment, increment
        if not is_shown or step <= self._sent.get(_common_prefix(phase, [key]), -1):
            return
        rows = [self._table_row(step, sample) for sample in samples]
        if phase not in self._tables:
            import wandb

            self._tables[phase] = wandb.Table(columns=list(rows[0]), log_mode="INCREMENTAL")
        for row in rows:
            self._tables[phase].add_data(*row.values())
        self._run.log({key: self._tables[phase], f"{phase}/step": step})

    def histograms(self, phase: str, step: int, numbers: Mapping[str, Sequence[float]]) -> None:
        """Send histograms, unless W&B has them already."""
        import wandb

        shown = {
            f"{phase}/histograms/{name}": wandb.Histogram(values)
            for name, values in numbers.items()
        }
        if shown and step > self._sent.get(_common_prefix(phase, shown), -1):
            self._run.log({**shown, f"{phase}/step": step})

    def alert(self, alarm: Alarm) -> None:
        """Send an alarm as an alert, which W&B forwards as its user has configured."""
        self._run.alert(title=f"{alarm.name} in {alarm.phase}", text=alarm.line)

    def conclude(self, result: Mapping[str, Any]) -> None:
        """Write the objective and all numbers to the run's summary; log the models as artifacts."""
        numbers = {
            f"result/{phase}/{name}": value
            for phase, measures in result["phases"].items()
            for name, value in measures.items()
            if isinstance(value, int | float)
        }
        for when in ("planned", "measured"):
            numbers |= {f"{when}/{name}": value for name, value in result.get(when, {}).items()}
        self._run.summary.update({"objective": result["objective"]} | numbers)
        for phase in result["phases"]:
            weights = find_files(self._run_dir, f"{phase}/*/*.safetensors")
            for folder in dict.fromkeys(path.parent for path in weights):
                self._log_model(phase, folder)

    def _log_model(self, phase: str, folder: Path) -> None:
        """Log a model's folder as an artifact: a reference, or its files with tracking.upload."""
        import wandb

        name = f"{phase}-{folder.name}"
        manifest = read_stored_text(folder.parent / MANIFEST) or ""
        metadata = {"run_dir": str(self._run_dir), "manifest": sha256_of(manifest.encode())}
        artifact = wandb.Artifact(f"{self._run.id}-{name}", type="model", metadata=metadata)
        if self._uploads:
            artifact.add_dir(str(folder))
        else:
            artifact.add_reference(folder.as_uri(), name=name, checksum=False)
        self._run.log_artifact(artifact, aliases=[self._run_dir.name])

    @property
    def project_path(self) -> str:
        """Return ENTITY/PROJECT of the run."""
        return f"{self._run.entity}/{self._run.project}"

    def finish(self) -> None:
        """Upload the remaining data and end the run."""
        self._run.finish()

    def _table_row(self, step: int, sample: Sample) -> dict[str, Any]:
        """Return a row of the table; all cells of a column have the same type."""
        return {
            "step": step,
            "model": sample.model,
            "prompt": sample.prompt,
            "response": sample.response,
            "response before": self._first.get(sample.prompt, ""),
            "score": sample.score,
            **(sample.gold_parts or {}),
            "KL": sample.kl,
            "tokens": len(sample.tokens),
            "ended": sample.ended,
        }

    def _last_sent_steps(self, run_dir: Path, *, is_offline: bool) -> dict[str, int]:
        """Return the last step that W&B has stored, for each prefix of ``_common_prefix``.

        This is read from the stored run, since a killed process loses what W&B has not stored yet.
        """
        sent: dict[str, int] = {}
        if is_offline:
            for line in read_wandb_history(run_dir):
                for phase in PREFIXES:
                    if (step := line.pop(f"{phase}/step", None)) is not None:
                        prefix = _common_prefix(phase, [n for n in line if not n.startswith("_")])
                        sent[prefix] = max(step, sent.get(prefix, -1))
            return sent
        for phase in PREFIXES:
            if (step := self._run.summary.get(f"{phase}/step")) is not None:
                prefixes = [*(f"{phase}/{part}" for part in PARTS), phase]
                sent |= {_common_prefix(phase, [prefix]): step for prefix in prefixes}
        return sent


def _build_data_artifact(data: Mapping[str, Any]) -> wandb.Artifact:
    """Return the artifact of a run's data: its keys, and references to local files."""
    import wandb

    source, paths = data["source"], [] if data["path"] is None else data["path"]
    artifact = wandb.Artifact(f"data-{source}", type="dataset", metadata=dict(data))
    paths = paths if isinstance(paths, list) else [paths]
    paths = [*paths, *(each["path"] for each in data["sets"].values())]
    for number, path in enumerate(paths if source == Source.local else []):
        place = Path(path).expanduser().resolve()
        if place.exists():  # not a pattern of several files
            artifact.add_reference(place.as_uri(), name=f"{number}-{place.name}", checksum=False)
    return artifact


def save_views(project_path: str, say: Callable[[str], None]) -> None:
    """Save the views of a project once; the run neither waits for this nor fails with it.

    ``say`` prints the address of the first view, or the command to type if there is none.
    """
    words = [*VIEWS_COMMAND.split()[1:], project_path]
    by_hand = name_commands(f"{VIEWS_COMMAND} {project_path}")
    if find_spec("wandb_workspaces") is None:
        say(f"for views of {project_path}: {INSTALL_VIEWS}{by_hand}")
        return

    def run_command() -> None:
        run = partial(subprocess.run, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        try:
            done = run([sys.executable, "-P", *words, "--once"], timeout=VIEWS_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            reason = " ".join(str(getattr(error, "stderr", None) or error).split())
            say(f"warning: no views of {project_path} were saved ({reason}). Later: {by_hand}")
        else:
            say(f"views of {project_path}: {done.stdout.partition(chr(10))[0]}")

    Thread(target=run_command, daemon=True).start()


def phase_of_metric(metric: str) -> Phase:
    """Return the phase that logs a metric, and whose steps are the metric's x axis."""
    prefix = metric.partition("/")[0]
    return next(phase for phase, prefixes in PREFIXES.items() if prefix in prefixes)


def _common_prefix(phase: str, names: Iterable[str]) -> str:
    """Return PHASE/PART if all ``names`` begin with it for one of ``PARTS``, otherwise PHASE."""
    for part in PARTS:
        if all(name.startswith(f"{phase}/{part}") for name in names):
            return f"{phase}/{part}"
    return phase


def _require_login(mode: WandbMode) -> None:
    """Check that mode online has credentials: ``wandb.init`` would otherwise prompt for them."""
    import wandb

    if mode is WandbMode.online and not wandb.login(prompt=False, verify=False):
        raise CapabilityError(
            "tracking.wandb=online: no Weights & Biases credentials on this machine (or WANDB_MODE "
            "forbids the network). Type `wandb login`, set WANDB_API_KEY, or use "
            "tracking=wandb_offline."
        )


def _start_run(
    config: TrackingConfig, run_dir: Path, run_config: dict[str, Any], names: dict[str, Any]
) -> wandb.Run:
    """Start the W&B run; retry if the connection fails."""
    import wandb
    from wandb.errors import CommError

    settings = wandb.Settings(
        init_timeout=INIT_TIMEOUT_SECONDS,
        # Console capture would record every frame of the progress bar.
        console="off",
        finish_timeout=0.9 * LONG_CALL * config.timeout_seconds,
        finish_timeout_raises=True,
        # quiet still prints an online run's address; silent prints nothing, for offline runs.
        quiet=True,
        silent=config.wandb is WandbMode.offline,
    )
    for attempt in range(1, INIT_ATTEMPTS + 1):
        try:
            return wandb.init(
                project=config.project,
                entity=config.entity,
                **names,
                tags=config.tags,
                config=run_config,
                mode=config.wandb.value,
                dir=run_dir,
                id=_read_or_create_run_id(run_dir / "wandb_id"),
                resume="allow",
                settings=settings,
            )
        except CommError:
            if attempt == INIT_ATTEMPTS:
                raise
            wandb.teardown()  # the service process may hold the run's id
    raise AssertionError("the last attempt returns or raises")


def _read_or_create_run_id(path: Path) -> str:
    """Return the id that a W&B sweep agent sets, or the id in ``path``, created on first use."""
    prescribed = os.environ.get("WANDB_RUN_ID")
    if prescribed is None and (stored := read_stored_text(path)) is not None:
        if not re.fullmatch(r"[\w-]{1,64}", stored.strip()):
            raise DamagedFileError(path, "it has no id of a W&B run")
        return stored.strip()
    run_id = prescribed or secrets.token_hex(8)
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id


def find_offline_files(run_dir: Path) -> list[Path]:
    """Return the .wandb files of a run's attempts, without links, which may lead to another run."""
    return find_files(run_dir, OFFLINE_FILES)


def read_wandb_records(path: Path) -> Iterator[tuple[Any, int]]:
    """Yield each complete record of a .wandb file, and the position of its end.

    wandb 0.31 has no reader for these files.
    """
    from wandb.proto import wandb_internal_pb2

    data, position, parts = read_bytes(path) or b"", FILE_HEADER, b""
    while position + HEADER <= len(data):
        remaining = BLOCK - position % BLOCK
        if remaining < HEADER:
            position += remaining  # the rest of a block is padding
            continue
        _crc, length, chunk_kind = struct.unpack_from("<IHB", data, position)
        position += HEADER
        if position + length > len(data):
            return
        parts += data[position : position + length]
        position += length
        if chunk_kind in {FULL, LAST}:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record, position


def cut_incomplete_records(run_dir: Path) -> None:
    """Cut files of killed attempts after their last complete record; remove files that have none.

    ``wandb sync`` stops at an incomplete record, and does not upload the attempts that follow.
    """
    for path in find_offline_files(run_dir):
        ends = [end for _, end in read_wandb_records(path)]
        if ends:
            os.truncate(path, ends[-1])
        else:
            path.unlink()


def read_wandb_history(run_dir: Path) -> list[dict[str, Any]]:
    """Return what all attempts of a run have logged: one dict per call of ``log``."""
    logged = []
    for path in find_offline_files(run_dir):
        for record, _ in read_wandb_records(path):
            if record.HasField("history"):
                items = record.history.item
                named = {item.key or "/".join(item.nested_key): item.value_json for item in items}
                logged.append({name: json.loads(value) for name, value in named.items()})
    return logged
