"""Config key names, did-you-mean suggestions, and short messages for Hydra's errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from rlhf.base.errors import ConfigError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.program import CONF, TOOLS
from rlhf.base.user_paths import relative_to_cwd
from rlhf.config.choices import Phase
from rlhf.config.hydra_parts import (
    CHOSEN_TWICE,
    FLAGS_CONFLICT,
    MALFORMED,
    NO_SUCH_KEY,
    NO_TEXT,
    RESOLVE_ALONE,
    SWEPT,
    parse_flags,
    parse_overrides,
)
from rlhf.config.schema.run import RunConfig
from rlhf.methods import how_to_install, refuse_broken_methods

# Patterns of command-line words of other programs -> the words to type here instead.
FOREIGN_WORDS: Mapping[str, str] = read_yaml_beside(__file__, "other_words.yaml")
NO_NEAR_KEY = "; python launch.py --help PART lists the keys that have PART in their names"
# The only group whose name on the command line differs from the key that it sets.
REWARD_MODEL_GROUP = "model@reward_model"

TYPES_IN_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
    NoneType: "null",
    Any: "any value",
}


def nearest_name(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice that is closest to ``name``, or None if no choice is close."""
    spelled = {choice.lower(): choice for choice in choices}
    close = get_close_matches(name.lower(), spelled, n=1)
    return spelled[close[0]] if close else None


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return "; did you mean ...?" for a wrong ``name``, or "" if no choice is close."""
    match = nearest_name(name, choices)
    return f"; did you mean {match}?" if match else ""


@cache
def schema_types(of: type = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Return the types of all dotted keys, including keys that are groups."""
    types: dict[str, Any] = {}
    for name, kind in get_type_hints(of).items():
        types[prefix + name] = kind
        if isinstance(kind, type) and is_dataclass(kind):
            types |= schema_types(kind, f"{prefix}{name}.")
    return types


def type_of_key(key: str) -> Any:
    """Return the type of a dotted key, which may be in a mapping, such as rewards.NAME.weight.

    Raises:
        KeyError: if there is no such key.
    """
    types = schema_types()
    for mapping, kind in types.items():
        if get_origin(kind) is dict and key.startswith(f"{mapping}."):
            value: Any = get_args(kind)[1]
            _, _, rest = key.removeprefix(f"{mapping}.").partition(".")
            return schema_types(value)[rest] if rest and isinstance(value, type) else value
    return types[key]


def _entry_type(key: str) -> type | None:
    """Return the dataclass of ``key`` if it names an entry of a mapping, such as rewards.NAME."""
    try:
        kind = type_of_key(key)
    except KeyError:
        return None
    return kind if isinstance(kind, type) and is_dataclass(kind) else None


def describe_type(kind: Any) -> str:
    """Return a description of the command-line values of a key of type ``kind``."""
    if get_origin(kind) is UnionType:
        return " or ".join(describe_type(member) for member in get_args(kind))
    if get_origin(kind) is list:
        return f"a list, each item {describe_type(get_args(kind)[0])}"
    if is_dataclass(kind):
        return "a group of keys"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(kind.__members__)}"
    return TYPES_IN_WORDS[get_origin(kind) or kind]


def unknown_key_error(key: str, siblings: Iterable[str] = ()) -> ConfigError:
    """Return the error for a key that does not exist; ``siblings`` are the other keys beside it."""
    refuse_broken_methods()
    if (package := missing_package(key)) is not None:
        return ConfigError(f"{key}: {package}")
    keys = schema_types()
    if any(kind == dict[str, Any] and key.startswith(f"{name}.") for name, kind in keys.items()):
        hint = did_you_mean(key.rpartition(".")[2], siblings)
        return ConfigError(f"unknown key {key}; to add a new key, write +{key}=VALUE{hint}")
    owner, _, last = key.rpartition(".")
    if owner not in keys and (entry := _entry_type(owner)) is not None:
        hint = did_you_mean(last, schema_types(entry))
        if last in schema_types(entry):
            hint = f"; give a new entry as a whole, such as '{owner}={{{last}: VALUE}}'"
        return ConfigError(f"unknown key {key}{hint}")
    if meant := " or ".join(suggested_keys(key, keys)):
        return ConfigError(f"unknown key {key}; did you mean {meant}?")
    hint = did_you_mean(key, [name for name in (*keys, REWARD_MODEL_GROUP) if name != key])
    return ConfigError(f"unknown key {key}{hint or NO_NEAR_KEY}")


def missing_package(words: str) -> str | None:
    """Return how to get the package of a key, KEY=VALUE or GROUP=OPTION; None if none is known."""
    words = re.sub(r"^rewards\.\w+\.", "rewards.NAME.", words)
    for package, known in read_yaml_beside(__file__, "packages.yaml").items():
        if any(f"{words}.".startswith(f"{name}.") for name in known):
            return f"belongs to {package}, which is not installed; {how_to_install(package)}"
    return None


@cache
def own_keys_by_foreign_key() -> Mapping[str, list[str]]:
    """Return our keys to propose for each key of another program, from other_names.yaml."""
    return {
        name: [
            word.replace("*", phase)
            for word in ours.split(" or ")
            for phase in (Phase if "*" in word else ("",))
        ]
        for ours, others in read_yaml_beside(__file__, "other_names.yaml").items()
        for name in others
    }


def suggested_keys(name: str, keys: Iterable[str]) -> list[str]:
    """Return the keys that the user may have meant by ``name``.

    ``name`` may be a key of another program, or one of our ``keys`` without its group. If ``name``
    begins with one of our groups, only that group's keys are returned, if there are any.
    """
    parts = name.replace("-", "_").split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    others = own_keys_by_foreign_key()
    known = next((others[end] for end in ends if end in others), None)
    within = next(([end] for end in ends[1:] if end in keys), None)
    candidates = known or within or [key for key in keys if key.endswith(f".{parts[-1]}")]
    return [each for each in candidates if each.startswith(f"{parts[0]}.")] or candidates


def refuse_unreadable_words(words: Iterable[str]) -> None:
    """Check that no word is too long, or nested too deeply, for Hydra's parser."""
    for word in words:
        if len(word) > LONGEST_WORD or re.search(UNREADABLE_WORD, word):
            raise ConfigError(
                f"{word[:60]}... ({len(word)} characters): an argument can have at most "
                f"{LONGEST_WORD} characters, keys and numbers of at most {MOST_DIGITS} each and "
                f"{MOST_BRACKETS} brackets in a row; put long values into a file of conf/"
            )


def refuse_unknown_flags(words: Sequence[str]) -> None:
    """Raise ConfigError for a flag that Hydra does not have; the message proposes key=value."""
    flags, unknown = parse_flags(words)
    if flags.experimental_rerun is not None:
        raise ConfigError(
            f"--experimental-rerun {flags.experimental_rerun}: would run code from a pickled file, "
            "which no run writes; python launch.py resume=RUN_DIR continues a run"
        )
    typed = next((w for w in words if w in unknown and re.match(r"--?[A-Za-z]", w)), None)
    if typed is None and unknown:
        raise ConfigError(
            f"{unknown[0]}: keys cannot be on both sides of a flag; "
            "put the flags first: python launch.py -m KEY=VALUE ..."
        )
    if typed is None:
        return
    flag, _, value = typed.partition("=")
    following = words[words.index(typed) + 1 :][:1]
    if not value and following and not re.match(r"-|.*=", following[0]):
        value = following[0]
    name, keys = flag.lstrip("-").replace("-", "_"), schema_types()
    our_keys = own_keys_by_foreign_key().get(name) or [name]
    close = our_keys if name in keys else suggested_keys(name, keys)
    close = close or list(filter(None, [nearest_name(name, keys)]))
    full = (candidate if "=" in candidate else f"{candidate}=VALUE" for candidate in close)
    meant = [re.sub("(N|VALUE)$", lambda end: value or end[0], candidate) for candidate in full]
    hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
    raise ConfigError(f"unknown option {flag}: keys are written key=value, without dashes{hint}")


def refuse_words_of_other_programs(words: Sequence[str]) -> None:
    """Raise ConfigError for a word that is no override of ours; the message says what to type."""
    for word in parse_flags(words)[0].overrides:
        for pattern, ours in FOREIGN_WORDS.items():
            if match := re.fullmatch(pattern, word.lstrip("+"), re.IGNORECASE):
                raise ConfigError(f"{word}: not an override of rlhf; write {match.expand(ours)}")


LONGEST_WORD, MOST_DIGITS, MOST_BRACKETS, LONGEST_REASON = 16_384, 1000, 50, 300
UNREADABLE_WORD = rf"([\[{{(][\s\w:]*){{{MOST_BRACKETS + 1}}}|\d{{{MOST_DIGITS + 1}}}"
UNREADABLE_WORD += rf"|^[^=]{{{MOST_DIGITS + 1}}}"
RUN_FOLDERS = ("run_dir", "resume", "from_run")
OPEN_HYDRA_KEYS = ("hydra.launcher.additional_parameters", "hydra.job.env_set")  # accept any key
# submitit_slurm is reserved for Hydra's plugin; our slurm takes the nodes from ``hardware``.
REPLACED_WORDS = {"hydra/launcher=submitit_slurm": "hydra/launcher=slurm"}


def to_hydra_override(word: str) -> str:
    """Rewrite the override ``word`` as typed by a user to the form that Hydra needs.

    A mapping gets ++ in front, because Hydra otherwise refuses new keys in it. The folder of a
    sweep's job has ``=`` and ``,`` in its name and is quoted: an unquoted ``,`` starts a sweep. A
    number (hardware=4090) is quoted too, because Hydra accepts no number as a group's option.
    """
    word = REPLACED_WORDS.get(word, word)
    key, _, value = word.partition("=")
    is_folder = key in RUN_FOLDERS and "=" in value and value[0] not in "'\""
    if is_folder or (key == "hardware" and value.isdecimal()):
        return f"{key}='{value}'"
    owners = (key, key.rpartition(".")[0])
    is_open = any(each in OPEN_HYDRA_KEYS for each in owners) or (
        value.startswith("{")
        and any(get_origin(schema_types().get(each)) is dict for each in owners)
    )
    return f"++{word}" if is_open else word


def explain_hydra_error(error: Exception, overrides: Sequence[str]) -> ConfigError | None:
    """Return our own error for an error of Hydra; None if ``error`` does not come from Hydra."""
    if isinstance(error, MissingConfigException):
        return _unknown_option_error(error, overrides)
    if isinstance(error, OverrideParseException):
        return _malformed_override_error(error)
    if isinstance(error, InterpolationResolutionError | GrammarParseError):  # some are ValueErrors
        return interpolation_error(error)
    if isinstance(error, YAMLError):  # of a file that a chosen option names
        return ConfigError(" ".join(str(error).split()))
    if isinstance(error, ValueError):
        return _value_error(str(error), overrides)
    return _composition_error(error, overrides) if isinstance(error, HydraException) else None


def shorten(text: str) -> str:
    """Return ``text``, cut to LONGEST_REASON characters so that error messages stay readable."""
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


def interpolation_error(error: OmegaConfBaseException) -> ConfigError:
    """Return our own error for a ${...} that has no value."""
    reason = shorten(_first_line(str(error.msg or error)))
    return ConfigError(
        f"{error.full_key or 'the command'}: its interpolation has no value ({reason}); ${{...}} "
        "must name another key, or, with oc.env:, an environment variable that is set"
    )


def _value_error(text: str, overrides: Sequence[str]) -> ConfigError | None:
    """Return our own error for a ValueError with this text; None if Hydra did not raise it."""
    if text.startswith(NO_TEXT):
        return ConfigError(_explain_non_text_option(overrides))
    if text.startswith(FLAGS_CONFLICT):
        return ConfigError(
            "--multirun (-m), --run, --cfg, --info and --shell-completion cannot be combined: "
            "use only one, such as --cfg job without -m for the configuration of one run"
        )
    is_of_hydra = text.startswith((RESOLVE_ALONE, "Unable to configure"))
    return ConfigError(_first_line(text)) if is_of_hydra else None


def _malformed_override_error(error: OverrideParseException) -> ConfigError:
    reason = _first_line(error.message.removeprefix(f"{MALFORMED}{error.override}'"))
    # The lexer only repeats the override; it gives no reason.
    reason = "" if reason.startswith("LexerNoViableAlt") else f": {reason}"
    override = shorten(error.override)
    key, has_value, value = override.partition("=")
    if not has_value:
        is_key = key.rstrip(":") in schema_types()
        typed, near = (key.rstrip(":"), "") if is_key else ("KEY", did_you_mean(key, TOOLS))
        return ConfigError(
            f"cannot read {override}: it has no =; write {typed}=VALUE without spaces around =, "
            f"and a value with spaces in two pairs of quotes: \"name='my run'\"{near}"
        )
    if get_origin(schema_types().get(key)) is list and "]" not in value:  # divided at its spaces
        return ConfigError(f"cannot read {override}: write the list without spaces: {key}=[A,B]")
    first, *others = re.split(r"[\s,]+(?=[\w.@]+=)", override)
    if others and all(each.partition("=")[0] in schema_types() for each in others):
        return ConfigError(
            f"cannot read {override}: write {' '.join((first, *others))} without quotes or commas"
        )
    return ConfigError(
        f"""cannot read {override}{reason}; to pass text, write "{key}='{value}'\""""
    )


def _unknown_option_error(error: MissingConfigException, overrides: Sequence[str]) -> ConfigError:
    file = error.missing_cfg_file
    if file is None or not error.options:
        is_of_flag = "rimary config" in str(error)
        way_out = "; leave --config-name and --config-path out" if is_of_flag else ""
        return ConfigError(f"{_first_line(str(error)).rstrip('.')}{way_out}")
    group, _, option = file.rpartition("/")
    key = group
    for override in overrides:
        typed, _, value = override.lstrip("+").partition("=")
        name = file.removeprefix(f"{typed.split('@')[0]}/")
        if name in re.split(r"[,\s\[\]]+", value):
            group, option, key = typed.split("@")[0], name, typed
    if (package := missing_package(f"{group}={option}")) is not None:
        return ConfigError(f"{key}={option}: {package}")
    wrong, path = f"unknown option {key}={option}", f"{key.rpartition('@')[2]}.path={option}"
    longer_options = [choice for choice in error.options if choice.startswith(option)]
    near = " or ".join(longer_options) or nearest_name(option, error.options)
    hint = f"; did you mean {near}?" if near else ""
    if group == "model":
        hint += f"; for a model of the hub or a folder, write {key}=pretrained {path}"
    if group == "data":
        is_hub = re.fullmatch(r"[\w-]+/[\w-]+", option)
        hint += f"; for data of your own, write data={'hub' if is_hub else 'local'} {path}"
    if group == "hardware":
        template = relative_to_cwd(CONF / "hardware" / "template.yaml")
        hint += (
            f"; for another machine, copy {template} to conf/hardware/{option}.yaml and fill in "
            "the machine's figures"
        )
    if group in ("model", "data") and (longer_options or re.search("[/.]", option)):
        return ConfigError(f"{wrong}{hint}")
    return ConfigError(f"{wrong}; options: {', '.join(error.options)}{hint}")


def _explain_non_text_option(overrides: Sequence[str]) -> str:
    """Return the message for groups set to a number or null; Hydra's message does not name them."""
    groups = {key for key, kind in schema_types().items() if is_dataclass(kind)} | {"experiment"}
    with_values = [o for o in overrides if "=" in o and not o.startswith("-")]
    wrong = [
        override.input_line
        for override in parse_overrides(with_values)
        if override.key_or_group in groups and not isinstance(override.value(), str | list)
    ]
    return (
        f"cannot choose {' '.join(map(str, wrong))}: a group takes the name of one of its options, "
        "see python launch.py --help"
    )


def _composition_error(error: HydraException, overrides: Sequence[str]) -> ConfigError:
    """Return the error for any other error of Hydra, on one line."""
    cause = error.__cause__
    if match := re.search(rf"{NO_SUCH_KEY}([^']+)'", str(error)):
        parent = cause.parent_node if isinstance(cause, OmegaConfBaseException) else None
        siblings = map(str, parent) if isinstance(parent, DictConfig) else ()
        # Hydra names only the group of a key in ppo={lr: 3}.
        whole = getattr(cause, "full_key", None) if match[1] in schema_types() else None
        first = unknown_key_error(whole or match[1], siblings)
        typed = [word.lstrip("+").partition("=")[0] for word in overrides]
        foreign = [key for key in typed if key in own_keys_by_foreign_key().keys() - {match[1]}]
        others = map(unknown_key_error, [key for key in foreign if key not in schema_types()])
        return ConfigError(" ".join(map(str, (first, *others))))
    reason = " ".join(str(error).split())
    if match := re.match(rf"{CHOSEN_TWICE}([^. ]+)", reason):
        word = next((each for each in overrides if each.startswith(f"+{match[1]}=")), match[1])
        return ConfigError(f"{word}: the group has an option already; write {word.lstrip('+')}")
    if match := re.match(rf"(?:{'|'.join(SWEPT)})([^']+)'", reason):
        both = "; for both in one run, tracking=wandb tracking.tensorboard=true"
        hint = both if match[1].startswith("tracking=") else ""
        return ConfigError(f"{match[1]}: for a run with each of these values, add -m{hint}")
    if isinstance(cause, OmegaConfBaseException):
        where = reason or "a ${...} in a file that this command chose"
        reason = f"{where}: {_first_line(str(cause))}"
    return ConfigError(reason)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
