"""Bring the configuration of an older run up to date, by the table history.yaml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.schema.keys import format_value
from rlhf.methods import installed_methods

FIRST_VERSION = "0.1.0"
ANY_NAME = "NAME"  # in the table, a name that users choose, such as that of a part of ``rewards``


class Changes(NamedTuple):
    """The changes that bring a stored configuration up to date."""

    version: str
    """The last version that can have stored the configuration."""
    filled: Mapping[str, Any]
    """The value of each key that was added later."""
    renamed: Mapping[str, str]
    """New names by the old ones; both are KEY or KEY=VALUE."""
    lost: Mapping[str, Any]
    """The stored value of each key that was removed, or whose value was, if it had an effect."""
    texts: Mapping[str, str]
    """Texts on what was lost, with what to use instead, and the key that each is about."""

    def describe(self) -> str:
        """Return the changes in words; "" if nothing that had an effect changes."""
        count = len(self.filled)
        parts = [f"{count} key{'s' * (count > 1)} set to their former behavior"] if count else []
        parts += [f"{old} is now {new}" for old, new in self.renamed.items()]
        return f"of {self.version}: {', '.join([*parts, *self.texts])}" * bool(parts or self.texts)


@cache
def read_history() -> Mapping[str, Any]:
    """Return the history of the configuration's keys and of the metrics; do not change it."""
    history: Mapping[str, Any] = read_yaml_beside(__file__, "history.yaml")
    return history


def bring_up_to_date(stored: dict[Any, Any]) -> Changes:
    """Change the plain values of a stored configuration to what this version would have stored.

    A key that no version had stays, and a key that every version had is not filled in: such a
    configuration is damaged, or not of a run, and is refused when it is used.
    """
    renamed, lost = _rename_keys(stored), _remove_keys(stored)
    filled, version = _fill_in_keys(stored)
    return Changes(version, filled, renamed, *lost)


def _rename_keys(stored: dict[Any, Any]) -> dict[str, str]:
    renamed = {}
    for _, old, new in _iterate_rows("renamed"):
        new_key, _, new_value = new.partition("=")
        for group, name in _find(stored, old):
            *parts, new_name = new_key.split(".")
            target = group if ANY_NAME in parts else _open_group(stored, parts)
            if target is not None and (new_value or new_name not in target):
                target[new_name] = _replace(group.pop(name), old, new_value)
                renamed[old] = new
    return renamed


def _remove_keys(stored: dict[Any, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Remove keys, also idle ones of absent packages; return ``Changes.lost`` and ``texts``."""
    lost, texts = dict[str, Any](), dict[str, str]()
    for _, old, row in _iterate_rows("removed"):
        key, has_value, _ = old.partition("=")
        for group, name in _find(stored, old):
            value = group.pop(name)
            if has_value:
                group[name] = _replace(value, old, row["idle"])
            if has_value or value != row["idle"]:
                lost.setdefault(key, value)
                word = old if has_value else f"{key}={format_value(value)}"
                texts[f"{word} is gone: {row['instead']}"] = key
    installed = {method.package.partition(" ")[0] for method in installed_methods()}
    for package, key, default in _iterate_rows("packages"):
        for group, name in _find(stored, key) if package not in installed else ():
            if group[name] == default:
                del group[name]
    return lost, texts


def _fill_in_keys(stored: dict[Any, Any]) -> tuple[dict[str, Any], str]:
    """Add the keys that are missing; return them, and the last version that lacks them."""
    filled = {}
    versions = [FIRST_VERSION, *read_history()["keys"]["added"]]
    oldest = versions[-1]
    for version, key, value in _iterate_rows("added"):
        name = present_name(key)
        # Keys in mappings such as ``rewards`` have these values as defaults in the schema.
        if name is None or ANY_NAME in name:
            continue
        *parts, last = name.split(".")
        group = _open_group(stored, parts)
        if group is not None and last not in group:
            group[last] = filled[name] = value
            oldest = min(oldest, version, key=versions.index)
    return filled, versions[versions.index(oldest) - 1]


def present_name(key: str) -> str | None:
    """Return the name that a key of any version has now; None if it was removed."""
    new_names = {old: new for _, old, new in _iterate_rows("renamed")}
    while key in new_names:
        key = new_names[key]
    return None if any(key == old for _, old, _ in _iterate_rows("removed")) else key


def _iterate_rows(section: str) -> Iterator[tuple[str, str, Any]]:
    """Yield version (or package), key and content of each row in a section of the keys' history."""
    for version, rows in read_history()["keys"][section].items():
        for key, content in rows.items():
            yield version, key, content


def _find(stored: Any, row: str) -> list[tuple[dict[Any, Any], str]]:
    """Return the group and the last name of each key that ``row``, KEY or KEY=VALUE, describes."""
    key, _, text = row.partition("=")
    *parts, last = key.split(".")
    groups = [stored]
    for part in parts:
        children = (g for g in groups if isinstance(g, dict))
        groups = [g[n] for g in children for n in (g if part == ANY_NAME else {part} & g.keys())]
    return [
        (group, last)
        for group in groups
        if isinstance(group, dict) and last in group
        for value in [group[last]]
        if not text or text in map(format_value, value if isinstance(value, list) else [value])
    ]


def _replace(value: Any, row: str, new: Any) -> Any:
    """Return ``value`` with ``new`` for the VALUE of ``row``; None removes an item of a list."""
    _, has_value, text = row.partition("=")
    if not has_value or not isinstance(value, list):
        return new if has_value else value
    items = [new if format_value(item) == text else item for item in value]
    return [item for item in items if item is not None]


def _open_group(node: Any, parts: Sequence[str]) -> dict[Any, Any] | None:
    """Return the group of keys with this path, made if it is missing; None if it is no group."""
    for part in parts:
        node = node.setdefault(part, {}) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else None
