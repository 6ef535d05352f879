"""Changes of a configuration with which a run needs less memory."""

from __future__ import annotations

from typing import NamedTuple

from rlhf.config.schema.run import RunConfig


class Saving(NamedTuple):
    """A changed configuration with which a run needs less memory."""

    words: str
    """The change as overrides."""
    config: RunConfig
    is_exact: bool
    """True if the changed run computes the same weights."""
