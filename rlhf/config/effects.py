"""Effects of the configuration keys on results, as the schema declares them for every key.

They decide which phases can be reused, which keys resume and from_run may change, and which keys
on the command line are refused because nothing reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import cache, reduce
from operator import attrgetter, getitem
from typing import Any, NamedTuple, get_type_hints

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Phase
from rlhf.config.hydra_errors import REWARD_MODEL_GROUP
from rlhf.config.hydra_parts import parse_overrides
from rlhf.config.schema.keys import Affects, AtResume, Unread, format_value
from rlhf.config.schema.run import RunConfig
from rlhf.methods import installed_methods, methods_in_use


class Effect(NamedTuple):
    """The effect of a key, as its field declares it (see ``rlhf.config.schema.keys.key``)."""

    affects: Affects
    at_resume: AtResume = AtResume.fixed
    is_inherited: bool = False
    unread: Sequence[Unread] = ()

    @property
    def resume_may_change(self) -> bool:
        """Return True if a resumed run may change the key."""
        return self.at_resume is not AtResume.fixed


@cache
def effects_by_key() -> dict[str, Effect]:
    """Return the effect of every dotted key of the schema; groups have no entry."""
    effects = dict(_iterate_effects(RunConfig, "", {}))
    for method in installed_methods():
        for key, rule in method.unread.items():
            if key not in effects:
                owner = f"the method {method.name} of {method.package}"
                raise ConfigError(f"{owner}: unread lists {key}, which is not a key")
            effects[key] = effects[key]._replace(unread=(*effects[key].unread, rule))
    return effects


def _iterate_effects(
    schema: type, prefix: str, inherited: dict[str, Any]
) -> Iterator[tuple[str, Effect]]:
    """Yield each dotted key in ``schema`` and its effect.

    ``inherited`` maps arguments of ``Effect`` to the values set by the enclosing groups; a field
    of ``schema`` that sets an argument itself overrides the inherited value.
    """
    types = get_type_hints(schema)
    for field in fields(schema):
        declared = {fact: x for fact, x in field.metadata.items() if fact in Effect._fields}
        name, facts = prefix + field.name, {**inherited, **declared}
        if is_dataclass(field_type := types[field.name]):
            assert isinstance(field_type, type)
            yield from _iterate_effects(field_type, f"{name}.", facts)
        else:
            yield name, Effect(**facts)


def _find_key(key: str) -> str:
    """Return the schema's key that equals or contains ``key``, such as rewards; "" if none does."""
    while key and key not in effects_by_key():
        key = key.rpartition(".")[0]
    return key


def effect_of(key: str) -> Effect:
    """Return the effect of a dotted key, which may be in a mapping, such as rewards.NAME.weight."""
    return effects_by_key()[_find_key(key) or key]


def source_run_determines(key: str) -> bool:
    """Return True if a run with from_run takes ``key`` from the finished run, and cannot set it."""
    effect = effects_by_key().get(key)
    return effect is not None and effect.is_inherited and effect.at_resume is not AtResume.rounding


def values_that_affect(config: RunConfig, phases: frozenset[Phase]) -> dict[str, Any]:
    """Return, by dotted key, the plain values of all keys that affect one of ``phases``."""
    values = asdict(config)
    return {
        key: reduce(getitem, key.split("."), values)
        for key, effect in effects_by_key().items()
        if effect.affects(config) & phases
    }


def refuse_unread_keys(config: RunConfig, overrides: Sequence[str]) -> None:
    """Raise an error if an override sets a key that ``config`` does not read.

    Only keys on the command line are checked: a preset may set keys that this run does not read.
    """
    for override in parse_overrides(overrides):
        for key, value in _iterate_values(override.key_or_group, override.value()):
            # null has no effect anyway
            if value is not None and (reason := explain_if_unread(config, key, value)):
                raise ConfigError(f"{override.input_line}: {reason}")


def _iterate_values(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each key that an override sets, and its value: several if it sets keys of a group."""
    if isinstance(value, dict) and key not in effects_by_key():
        for name, item in value.items():
            yield from _iterate_values(f"{key}.{name}", item)
    else:
        yield key, value


def explain_if_unread(config: RunConfig, key: str, value: object = None) -> str:
    """Return why ``config`` does not read ``key``, with a fix that uses ``value``; or ""."""
    if not (name := _find_key(key)):
        return ""
    # Keys like ppo.critic_check.every affect no result: take the readers of their group.
    groups = {field.name: field.metadata["affects"] for field in fields(RunConfig)}
    readers = effect_of(name).affects(config) or groups[key.partition(".")[0]](config)
    if readers and not readers & set(config.phase.order):
        return (
            f"only {' and '.join(p for p in Phase if p in readers)} can read {name}, but is not in "
            f"phase.order=[{','.join(config.phase.order)}]; remove {key}, or choose another phase"
        )
    for rule in effect_of(name).unread:
        if (causes := _cause_values(config, name, rule)) is not None:
            settings = " and ".join(f"{cause}={format_value(x)}" for cause, x in causes.items())
            group = name.rpartition(".")[0]
            fix = rule.fix.format(
                key=next(iter(causes)),
                group=group,
                option=REWARD_MODEL_GROUP if group == "reward_model" else group,
                value=value if key.endswith(".path") else "FOLDER_OR_ID",
            )
            return f"has no effect with {settings}; {fix}, or remove {key}"
    return ""


def _cause_values(config: RunConfig, key: str, rule: Unread) -> dict[str, Any] | None:
    """Return the values, by key, with which ``rule`` makes ``key`` ineffective, or None."""
    group = key.rpartition(".")[0]
    keys = [name if "." in name else f"{group}.{name}" for name in rule.keys]
    values = [attrgetter(name)(config) for name in keys]
    return dict(zip(keys, values, strict=True)) if rule.holds(*values) else None


def refuse_two_replacements(config: RunConfig) -> None:
    """Raise ConfigError if two methods in use replace what the same key sets."""
    replaced: dict[str, str] = {}
    for method in methods_in_use(config):
        for key, rule in method.unread.items():
            if causes := _cause_values(config, key, rule):
                if key in replaced:
                    raise ConfigError(
                        f"the methods {replaced[key]} and {method.name} both replace what {key} "
                        f"sets; use one of them: {rule.fix.format(key=next(iter(causes)))}"
                    )
                replaced[key] = method.name
