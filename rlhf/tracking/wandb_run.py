"""Metrics in Weights & Biases: one run per run directory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.choices import Phase, WandbMode
from rlhf.config.schema.tracking import TrackingConfig
from rlhf.errors import CapabilityError
from rlhf.tracking.step_alarms import Alarm

if TYPE_CHECKING:
    import wandb

INIT_TIMEOUT_SECONDS = 30.0

# Prefixes of the metrics of each phase; only PPO logs metrics with other prefixes than its own.
PREFIXES: Mapping[Phase, tuple[str, ...]] = {
    Phase.sft: ("sft",),
    Phase.reward: ("reward",),
    Phase.ppo: ("ppo", "time", "speed"),
    Phase.dpo: ("dpo",),
}


class WandbTracker:
    """A tracker that sends metrics to Weights & Biases, or stores them in ``run_dir/wandb``.

    Each phase has its own x axis, ``<phase>/step``, so that a resumed run can log repeated steps
    again: W&B's own step can only increase.
    """

    def __init__(
        self,
        config: TrackingConfig,
        run_dir: Path,
        run_config: dict[str, Any],
        *,
        name: str,
        group: str,
        job_type: str,
    ) -> None:
        """Start or resume the run.

        Raises:
            CapabilityError: if mode online lacks credentials, or the server cannot be reached.
        """
        from wandb.errors import Error

        try:
            _require_login(config.wandb)
            names = {"name": name, "group": group, "job_type": job_type}
            self._run = _init(config, run_dir, run_config, names)
        except Error as error:
            raise CapabilityError(
                f"tracking.wandb={config.wandb}: Weights & Biases refused: {error}. "
                "Check the network and `wandb login --verify`, or use tracking=wandb_offline."
            ) from error
        for phase, prefixes in PREFIXES.items():
            self._run.define_metric(f"{phase}/step")
            for prefix in prefixes:
                self._run.define_metric(f"{prefix}/*", step_metric=f"{phase}/step")

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        self._run.log({**values, f"{phase}/step": step})

    def alert(self, alarm: Alarm) -> None:
        """Send an alarm as an alert; W&B forwards it to where its user asked for."""
        self._run.alert(title=f"{alarm.name} in {alarm.phase}", text=alarm.line)

    def finish(self) -> None:
        """Upload the remaining metrics and end the run."""
        self._run.finish()


def _require_login(mode: WandbMode) -> None:
    """Check that mode online has credentials: ``wandb.init`` would otherwise prompt for them."""
    import wandb

    if mode is WandbMode.online and not wandb.login(prompt=False, verify=False):
        raise CapabilityError(
            "tracking.wandb=online: no Weights & Biases credentials on this machine (or WANDB_MODE "
            "forbids the network). Type `wandb login`, set WANDB_API_KEY, or use "
            "tracking=wandb_offline."
        )


def _init(
    config: TrackingConfig, run_dir: Path, run_config: dict[str, Any], names: dict[str, str]
) -> wandb.Run:
    import wandb

    settings = wandb.Settings(
        init_timeout=INIT_TIMEOUT_SECONDS,
        # Console capture would record every frame of the progress bar.
        console="off",
        # quiet still prints the address of an online run; an offline run prints nothing.
        quiet=True,
        silent=config.wandb is WandbMode.offline,
    )
    return wandb.init(
        project=config.project,
        entity=config.entity,
        name=names["name"],
        group=names["group"],
        job_type=names["job_type"],
        tags=config.tags,
        config=run_config,
        mode=config.wandb.value,
        dir=run_dir,
        id=_run_id(run_dir / "wandb_id"),
        resume="allow",
        settings=settings,
    )


def _run_id(path: Path) -> str:
    """Return the id that a W&B sweep agent sets, or the id in ``path``, created on first use."""
    prescribed = os.environ.get("WANDB_RUN_ID")
    if prescribed is None and path.exists():
        return path.read_text(encoding="utf-8").strip()
    run_id = prescribed or secrets.token_hex(8)
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id
