"""The one source for what changes a result: facts that the schema declares of every key.

The store of phases, resume, from_run and the refusal of keys that nothing reads follow from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from rlhf.config.choices import Phase
from rlhf.config.schema.keys import Affects, AtResume, Unread
from rlhf.config.schema.run import RunConfig


class Effect(NamedTuple):
    """What the schema declares of a key (``rlhf.config.schema.keys.key``)."""

    affects: Affects
    at_resume: AtResume = AtResume.fixed
    is_inherited: bool = False
    unread: tuple[Unread, ...] = ()

    @property
    def may_change(self) -> bool:
        """Return True if a resumed run may change the key."""
        return self.at_resume is not AtResume.fixed


@cache
def effects() -> dict[str, Effect]:
    """Return the effect of every dotted key of the schema, groups left out."""
    return dict(_effects(RunConfig, "", {}))


def _effects(schema: type, prefix: str, outer: dict[str, Any]) -> Iterator[tuple[str, Effect]]:
    """Yield the effects of the keys in ``schema``; ``outer`` are facts of the group around it."""
    types = get_type_hints(schema)
    for field in fields(schema):
        name, facts = prefix + field.name, {**outer, **field.metadata}
        facts.pop("bound", None)
        if is_dataclass(kind := types[field.name]):
            assert isinstance(kind, type)
            yield from _effects(kind, f"{name}.", facts)
        else:
            yield name, Effect(**facts)


def effect_of(key: str) -> Effect:
    """Return the effect of a key, which may lie below a key of the schema that holds a mapping.

    Raises:
        KeyError: if there is no such key.
    """
    name = key
    while name and name not in effects():
        name = name.rpartition(".")[0]
    return effects()[name or key]


def values_that_affect(config: RunConfig, phases: frozenset[Phase]) -> dict[str, Any]:
    """Return the keys that one of ``phases`` reads, and their values, as asdict returns them."""
    return {
        key: value
        for key, value in _leaves(asdict(config), "")
        if effects()[key].affects(config) & phases
    }


def _leaves(group: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in group.items():
        key = prefix + name
        if key in effects():
            yield key, value
        else:
            yield from _leaves(value, f"{key}.")
