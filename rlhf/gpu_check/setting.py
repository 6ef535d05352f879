"""What every part of a check gets: its folder, and the size of what it measures."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Size(StrEnum):
    """The size of the models that are measured: memory and speed of tiny ones say little."""

    full = "full"
    tiny = "tiny"


@dataclass(frozen=True, kw_only=True)
class CheckSetting:
    """The folder of a part, which exists, and the size of its models."""

    folder: Path
    size: Size
