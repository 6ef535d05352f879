"""Interfaces of the seams: what a module of an option offers to the core, by the module's name.

``modules_of(NAME)`` of rlhf/options/__init__.py yields the modules NAME of the options. A caller
annotates them with the class below that describes NAME. Importing this file imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from rlhf.base.ranks import Ranks
    from rlhf.base.types import Responses, Rollout, RolloutBackend, StatefulWithTensors
    from rlhf.config.choices import Phase
    from rlhf.config.schema.run import RunConfig
    from rlhf.data.records import Record
    from rlhf.data.splits import PhaseData
    from rlhf.phases.shared.backends import BackendParts
    from rlhf.phases.shared.context import RunContext


class SourcesSeam(Protocol):
    """``sources``: makes the records of a run, instead of reading them from data sets.

    Used by environments.
    """

    def load_parts(self, config: RunConfig) -> dict[Phase, PhaseData]:
        """Return the records of the run's phases, divided by data.split."""


class BackendsSeam(Protocol):
    """``backends``: samples responses instead of the core's backends.

    Used by hybrid_engine and vllm.
    """

    def check(self, config: RunConfig, model: PreTrainedConfig | None) -> None:
        """Raise an error if the backend cannot sample here, or not from this ``model``."""

    def build(self, config: RunConfig, parts: BackendParts) -> RolloutBackend:
        """Return the backend."""


class StepsSeam(Protocol):
    """``steps``: looks at the trained models after a step.

    Used by replay.
    """

    def after_step(
        self,
        context: RunContext,
        phase: Phase,
        step: int,
        engines: Mapping[str, StatefulWithTensors],
        *,
        is_last: bool,
    ) -> None:
        """Read the engines after ``step``, before its checkpoint; every rank calls it."""


class Shown(NamedTuple):
    """Prompt and response as a reader sees them."""

    prompt: str
    response: str
    messages: list[dict[str, str]] | None = None
    """The messages of a response that has several."""


class Partner(Protocol):
    """The other side of a conversation, which answers responses while they are sampled."""

    def wrap(
        self, backend: RolloutBackend, tokenizer: PreTrainedTokenizerBase, ranks: Ranks
    ) -> RolloutBackend:
        """Return a backend whose responses are conversations with the partner."""

    def yardsticks(self, records: Sequence[Record]) -> dict[str, float]:
        """Return numbers for result.json that results with these ``records`` compare with."""

    def close(self) -> None:
        """End the processes of the partner."""


class ResponsesSeam(Protocol):
    """``responses``: answers what the policy writes, and measures and shows such responses.

    Used by environments.
    """

    SUCCESS: str
    """The measure that is 1 if a response is right."""

    def open_partner(self, config: RunConfig) -> Partner:
        """Return a partner, whose processes run until it is closed."""

    def measure(self, responses: Responses) -> dict[str, Tensor]:
        """Return measures (B,) of the responses, named GROUP/NAME."""

    def results(self, by_prompt: Mapping[str, list[float]], when: str) -> dict[str, Any]:
        """Return the entries of result.json for the values of the measures of each prompt."""

    def show(self, rollout: Rollout, texts: Sequence[str]) -> list[Shown]:
        """Return how a reader sees each row, whose response decodes to ``texts[row]``."""
