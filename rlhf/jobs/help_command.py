"""Print what ``python launch.py --help WORD`` asks for: keys, options of groups, or metrics."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser

from rlhf.base.errors import ConfigError
from rlhf.config.effects import effect_of
from rlhf.config.freeze import to_run_config
from rlhf.config.hydra_errors import describe_type, did_you_mean
from rlhf.config.schema.keys import AtResume, format_value
from rlhf.config.schema.run import RunConfig
from rlhf.run.metric_table import METRICS, MetricInfo

MOST_WHOLE = 3  # most entries to print whole; if there are more, only first lines are printed
AT_RESUME = {
    AtResume.fixed: "a resumed run keeps it",
    AtResume.rounding: "a resumed run may change it, which changes rounding only",
    AtResume.free: "a resumed run may change it",
}
HIDDEN = ("base", "hydra")  # folders of conf/ that hold no options


def print_help(words: Sequence[str], conf: Path) -> None:
    """Print the entries that the words after ``--help`` name, and exit; without a word, return.

    The printed values are from the configuration that the other ``words`` compose from ``conf``.

    Raises:
        ConfigError: if nothing has such a name.
    """
    flags, _ = get_args_parser().parse_known_args(list(words))
    asked = [word for word in flags.overrides if not word.partition("=")[2]]
    if not flags.help or not asked:
        return
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        config = to_run_config(compose("config", [w for w in flags.overrides if w not in asked]))
    entries = {
        **dict(_describe_keys(RunConfig, config, config)),
        **dict(_describe_group_options(conf)),
    }
    entries |= {name: _describe_metric(info) for name, info in METRICS.items()}
    for word in asked:
        for name in (found := matching_names(word, entries)):
            first, _, rest = entries[name].partition("\n")
            text = textwrap.fill(rest, 100, initial_indent="  ", subsequent_indent="  ")
            sys.stdout.write(f"{name}{first}\n" + (f"{text}\n" if len(found) <= MOST_WHOLE else ""))
    sys.exit(0)


def matching_names(word: str, names: Iterable[str]) -> list[str]:
    """Return ``word`` if it is in ``names``, else the names that begin with it or contain it.

    Raises:
        ConfigError: if there is no such name.
    """
    known = list(names)
    begin = [name for name in known if name.startswith(word)]
    found = [word] if word in known else begin or [name for name in known if word in name]
    if not found:
        hint = did_you_mean(word, known)
        raise ConfigError(f"--help {word}: no key, option or metric has this name{hint}")
    return found


def _describe_keys(
    schema: Any, values: Any, config: RunConfig, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield each dotted key in ``schema`` with its value, bound, effects and meaning."""
    types = get_type_hints(schema)
    for field in fields(schema):
        name, kind = prefix + field.name, types[field.name]
        value = getattr(values, field.name, None)
        if is_dataclass(kind):
            yield from _describe_keys(kind, value, config, f"{name}.")
            continue
        affects, at_resume, *_ = effect_of(name)
        phases = ", ".join(sorted(affects(config))) or "no phase"
        bound = f", {field.metadata['bound'].rule}" if "bound" in field.metadata else ""
        shown = "" if values is None else f" = {format_value(value)}"
        facts = f"({describe_type(kind)}{bound}; affects {phases}; {AT_RESUME[at_resume]})"
        yield name, f"{shown}  {facts}\n{field_docstrings(schema).get(field.name, '')}"
        if get_origin(kind) is dict and is_dataclass(entry := get_args(kind)[1]):
            yield from _describe_keys(entry, None, config, f"{name}.NAME.")


def _describe_group_options(conf: Path) -> Iterator[tuple[str, str]]:
    """Yield each ``group=option`` with the comments at the top of its file."""
    for path in sorted(conf.glob("*/**/*.yaml")):
        group, _, option = path.relative_to(conf).with_suffix("").as_posix().partition("/")
        lines = path.read_text(encoding="utf-8").splitlines()
        comments = [line[2:] for line in takewhile(lambda line: line.startswith("#"), lines)]
        told = [line for line in comments if not line.startswith(("@", "python "))]
        if group not in HIDDEN:
            yield f"{group}={option}", f"  {' '.join(told[:1])}\n{' '.join(told[1:])}"


def _describe_metric(info: MetricInfo) -> str:
    """Return a metric's unit, better direction, meaning and healthy values, as text."""
    direction = f"; {info.better} is better" if info.better else ""
    texts = f"{info.meaning}. Healthy: {info.healthy}. Otherwise: {info.otherwise}."
    return f"  ({info.unit}{direction})\n{texts}"


@cache
def field_docstrings(schema: type) -> dict[str, str]:
    """Return the docstring below every field of a dataclass, including its base classes' fields."""
    found: dict[str, str] = {}
    for each in reversed(schema.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    found[name] = " ".join(words.split())
    return found
