"""Metrics in TensorBoard event files, one directory per run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlhf.errors import CapabilityError


class TensorBoardTracker:
    """A tracker that writes metrics as scalars, under tags that start with the phase."""

    def __init__(self, folder: Path) -> None:
        """Open the event file.

        Raises:
            CapabilityError: if the package tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise CapabilityError(
                "tracking.tensorboard=true: the package tensorboard is not installed; "
                "pip install 'rlhf[tensorboard]', or use tracking=local"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        for name, value in values.items():
            tag = name if name.startswith(f"{phase}/") else f"{phase}/{name}"
            self._writer.add_scalar(tag, value, step)

    def finish(self) -> None:
        """Flush and close the file."""
        self._writer.close()
