"""Errors that end the program with a message, without a traceback; a user can fix nearly all.

Each message names the key (or the file and row), the value, the rule, and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhf.base.program import name_commands

USER_ERROR = 2  # exit code after an error that a user can fix
LOST_RANK = 1  # exit code after a rank was ended from outside; the run can be resumed
INTERRUPTED = 130  # exit code of a command that was stopped; its run or sweep can be continued


class RlhfError(Exception):
    """Base class of the errors that end the program with their message and ``exit_code``."""

    exit_code = USER_ERROR

    def __str__(self) -> str:
        """Return the message, with commands as they work in the current folder."""
        return name_commands(super().__str__())


class LostRankError(RlhfError):
    """A rank that crashed or was killed, or that has lost contact with other ranks."""

    exit_code = LOST_RANK


class ConfigError(RlhfError):
    """An invalid value of a configuration key."""


class DataError(RlhfError):
    """A data set that is missing, malformed or too small."""


class CapabilityError(RlhfError):
    """A requested feature that this machine, version or build does not support."""


class RewardError(RlhfError):
    """A reward model, or a part of the score (``rewards.NAME``), that cannot score responses."""


class RolloutError(RlhfError):
    """A rollout server that failed to sample, or did not sample with the actor's weights."""


class CheckpointError(RlhfError):
    """A folder that should contain an intact model or run but does not."""


def refuse_broken_rule(broken: Mapping[str, bool], prefix: str = "") -> None:
    """Raise ConfigError with ``prefix`` and the first message that ``broken`` maps to True."""
    if reason := next((reason for reason, is_broken in broken.items() if is_broken), None):
        raise ConfigError(prefix + reason)
