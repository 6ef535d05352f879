"""A run in TensorBoard event files, one directory per run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.base.errors import CapabilityError
from rlhf.config.freeze import flatten_keys
from rlhf.tracking.tracker import Sample, Tracker


class TensorBoardTracker(Tracker):
    """A tracker that writes scalars, samples as text, and the hyper-parameters with the result.

    A resumed run repeats steps after its checkpoint; steps in the event files are not added again.
    """

    def __init__(self, folder: Path, run_config: Mapping[str, Any]) -> None:
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
        self._written = _last_step_by_tag(folder)
        self._writer = SummaryWriter(str(folder))
        self._config = run_config

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002 - names begin with it
        """Write the metrics of one step, except those that the event files have already."""
        for name, value in values.items():
            if step > self._written.get(name, -1):
                self._writer.add_scalar(name, value, step)

    def samples(self, phase: str, step: int, samples: Sequence[Sample], *, steps: int) -> None:  # noqa: ARG002 - inherited
        """Write responses as one text."""
        if step <= self._written.get(f"{phase}/samples/text_summary", -1):
            return
        text = "\n\n".join(
            f"{each.model}, score {each.score:.2f}, KL {each.kl:.2f}\n\n"
            f"{_verbatim(each.prompt + each.response)}"
            for each in samples
        )
        self._writer.add_text(f"{phase}/samples", text, step)

    def conclude(self, result: Mapping[str, Any]) -> None:
        """Write the hyper-parameters with the objective."""
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

    sizes = {"scalars": 1, "tensors": 1}  # the last event is always kept
    events = event_accumulator.EventAccumulator(str(folder), sizes).Reload()
    tags = events.Tags()
    last = {tag: events.Scalars(tag)[-1].step for tag in tags["scalars"]}
    return last | {tag: events.Tensors(tag)[-1].step for tag in tags["tensors"]}


def _verbatim(text: str) -> str:
    """Return ``text`` as Markdown that shows it unchanged: text of a model is not markup."""
    return "\n".join(f"    {line}" for line in text.splitlines())
