"""Checks for keys on the command line that have no effect because of another key."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from hydra.core.override_parser.overrides_parser import OverridesParser

from rlhf.base.errors import ConfigError
from rlhf.config.effects import effects
from rlhf.config.hydra_errors import REWARD_MODEL_GROUP
from rlhf.config.schema.run import RunConfig


def refuse_unread_keys(config: RunConfig, overrides: Sequence[str]) -> None:
    """Raise an error if an override sets a key that ``config`` does not read.

    Only keys on the command line are checked: presets may set keys that other options read.
    """
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, value = override.key_or_group, override.value()
        if value is None:  # null has no effect anyway
            continue
        for name, effect in effects().items():
            if not f"{key}.".startswith(f"{name}."):
                continue
            group = name.rpartition(".")[0]
            option = REWARD_MODEL_GROUP if group == "reward_model" else group
            for rule in effect.unread:
                if not rule.holds(attrgetter(group)(config)):
                    continue
                named = value if key.endswith(".path") else "FOLDER_OR_ID"
                reason, way_out = (
                    text.format(group=group, option=option, value=named)
                    for text in (rule.reason, rule.way_out)
                )
                raise ConfigError(
                    f"{override.input_line}: {reason} and does not read {key}; {way_out}"
                )
