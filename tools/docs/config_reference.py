"""Generate the tables of docs/configuration.md: ``python -m tools.docs.config_reference``."""

from __future__ import annotations

import html
import inspect
import re
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rlhf.config.choices import Phase
from rlhf.config.effects import effect_of
from rlhf.config.hydra_errors import describe_type
from rlhf.config.schema.checkpoint import phases_that_measure_best
from rlhf.config.schema.run import RunConfig
from rlhf.options.ensembles.keys import phases_that_combine
from tools.docs.conf_comments import explanation
from tools.docs.pages import write_below

TABLE_MARK = "<!-- Made by `python -m tools.docs.config_reference` from here to the end. -->\n"
DEPENDING = {  # on another key, or on the value
    phases_that_measure_best: "the phase of checkpoint.best",
    phases_that_combine: "ppo; warm also reward",
}
HEADS = ("key", "value", "default", "must be", "affects", "resume", "meaning")


class Key(NamedTuple):
    """One row: a key, its values in words, its default, its bound, its effect and its meaning."""

    name: str
    kind: str
    default: str
    bound: str
    affects: str
    at_resume: str
    meaning: str


def reference(conf: Path) -> str:
    """Return all keys as Markdown: one table for the keys without a group, and one per group."""
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        defaults: Any = OmegaConf.to_container(compose("config"), resolve=False)
    types = get_type_hints(RunConfig)
    groups = {name: kind for name, kind in types.items() if is_dataclass(kind)}
    single = [key for key in _keys(RunConfig, defaults) if key.name not in groups]
    sections = [_section("The run", inspect.getdoc(RunConfig) or "", single)]
    for name, kind in groups.items():
        keys = _keys(kind, defaults[name], f"{name}.")
        sections.append(_section(name, inspect.getdoc(kind) or "", keys))
    return "\n".join(sections)


def _keys(schema: Any, defaults: Any, prefix: str = "") -> list[Key]:
    """Return the keys of a schema class, nested ones after the key that holds them.

    ``defaults`` maps fields to values; if it is no mapping, another key decides all values.
    """
    types, found = get_type_hints(schema), []
    for field in fields(schema):
        name, kind = prefix + field.name, types[field.name]
        default = _default(defaults[field.name]) if isinstance(defaults, dict) else ""
        bound = field.metadata["bound"].rule if "bound" in field.metadata else ""
        effect = ("", "") if is_dataclass(kind) else _effect(name)
        found.append(
            Key(name, describe_type(kind), default, bound, *effect, explanation(schema, field.name))
        )
        if is_dataclass(kind) and prefix:
            found += _keys(kind, defaults[field.name], f"{name}.")
        elif get_origin(kind) is dict and is_dataclass(of := get_args(kind)[1]):
            found += _keys(of, {f.name: _own_default(f) for f in fields(of)}, f"{name}.NAME.")
    return found


def _effect(key: str) -> tuple[str, str]:
    """Return the phases that a key affects, and if a resumed run may change it, as texts."""
    affects, at_resume, *_ = effect_of(key)
    if affects in DEPENDING:
        return DEPENDING[affects], at_resume.value
    found = affects(None)
    phases = "every phase" if found == set(Phase) else ", ".join(p for p in Phase if p in found)
    return phases or "nothing", at_resume.value


def _own_default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return "???" if field.default is MISSING else field.default


def _default(value: Any) -> str:
    """Return a default as it is typed; a value that another key decides is the name of that key."""
    if isinstance(value, dict) and value:
        return ""
    text = re.sub(r"^\$\{([\w.]+)\}$", r"\1", _typed(value))
    return f"`{text}`"


def _typed(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return f"[{','.join(map(_typed, value))}]"
        case float():
            return f"{value:g}"
    return str(value)


def _section(title: str, text: str, keys: list[Key]) -> str:
    cells = [(f"`{key.name}`", *key[1:6], _prose(key.meaning)) for key in keys]
    rows = [HEADS, ("---",) * len(HEADS), *cells]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"## {title}\n\n{_prose(text)}\n\n{table}"


def _prose(text: str) -> str:
    """Return a docstring as one line of Markdown, with links to the pages that it names."""
    line = html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")
    linked = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", line)
    return re.sub(r"https?://[^\s,;)]+", r"<\g<0>>", linked)


def renew_page(path: Path, conf: Path) -> None:
    """Replace the tables below the mark in ``path``; keep the text above it."""
    write_below(path, TABLE_MARK, reference(conf))


if __name__ == "__main__":
    renew_page(Path("docs/configuration.md"), Path("conf"))
