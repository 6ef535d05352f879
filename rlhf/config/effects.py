"""Effects of the configuration keys on results, as the schema declares them for every key.

They decide which phases can be reused, which keys resume and from_run may change, and which keys
on the command line are refused because nothing reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import cache, reduce
from operator import attrgetter, getitem
from typing import Any, NamedTuple, cast, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Phase
from rlhf.config.hydra_errors import REWARD_MODEL_GROUP
from rlhf.config.schema.keys import Affects, AtResume, Unread
from rlhf.config.schema.run import RunConfig
from rlhf.options import hooks_of


class Effect(NamedTuple):
    """What the field of a key declares, such as the phases that read the key."""

    affects: Affects
    at_resume: AtResume = AtResume.fixed
    is_inherited: bool = False
    unread: tuple[Unread, ...] = ()

    @property
    def resume_may_change(self) -> bool:
        """Return True if a resumed run may change the key."""
        return self.at_resume is not AtResume.fixed


@cache
def effects_by_key() -> dict[str, Effect]:
    """Return the effect of every dotted key of the schema; groups have no entry."""
    found = dict(_iterate_effects(RunConfig, "", {}))
    for rules in hooks_of("keys", "UNREAD"):
        for key, rule in rules.items():
            found[key] = found[key]._replace(unread=(*found[key].unread, rule))
    return found


def _iterate_effects(
    schema: type, prefix: str, inherited: dict[str, Any]
) -> Iterator[tuple[str, Effect]]:
    """Yield each dotted key in ``schema`` and its effect.

    ``inherited`` maps arguments of ``Effect`` to the values set by the enclosing groups; a field
    of ``schema`` that sets an argument itself overrides the inherited value.
    """
    types = get_type_hints(schema)
    for field in fields(schema):
        name, facts = prefix + field.name, {**inherited, **field.metadata}
        for of_value in ("bound", "is_place"):
            facts.pop(of_value, None)
        if is_dataclass(kind := types[field.name]):
            assert isinstance(kind, type)
            yield from _iterate_effects(kind, f"{name}.", facts)
        else:
            yield name, Effect(**facts)


def effect_of(key: str) -> Effect:
    """Return the effect of a dotted key, which may be in a mapping, such as rewards.NAME.weight."""
    name = key
    while name and name not in effects_by_key():
        name = name.rpartition(".")[0]
    return effects_by_key()[name or key]


def values_that_affect(config: RunConfig, phases: frozenset[Phase]) -> dict[str, Any]:
    """Return, by dotted key, the plain values of all keys that affect one of ``phases``."""
    values = asdict(config)
    return {
        key: reduce(getitem, key.split("."), values)
        for key, effect in effects_by_key().items()
        if effect.affects(config) & phases
    }


def _find_affects_function(group: str) -> Affects:
    """Return the function that finds which phases read the keys of the top-level ``group``."""
    (affects,) = (f.metadata["affects"] for f in fields(RunConfig) if f.name == group)
    return cast("Affects", affects)


def refuse_unread_keys(config: RunConfig, overrides: Sequence[str]) -> None:
    """Raise an error if an override sets a key that ``config`` does not read.

    Only keys on the command line are checked: a preset may set keys that this run does not read.
    """
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, value = override.key_or_group, override.value()
        if value is None:  # null has no effect anyway
            continue
        for name, effect in effects_by_key().items():
            if not f"{key}.".startswith(f"{name}."):
                continue
            # Keys like ppo.critic_check.every affect no result: take the readers of their group.
            readers = effect.affects(config) or _find_affects_function(key.split(".")[0])(config)
            if readers and not readers & set(config.phase.order):
                raise ConfigError(
                    f"{override.input_line}: only {' and '.join(p for p in Phase if p in readers)} "
                    f"can read {name}, and is not in phase.order=[{','.join(config.phase.order)}]; "
                    f"remove {key}, or choose another phase"
                )
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
