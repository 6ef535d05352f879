"""Schema and rules of ``rewards``: the parts of which a score is the weighted sum."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlhf.base.errors import ConfigError, refuse_broken_rule
from rlhf.config.choices import ModelInit, Phase, RewardKind, Source
from rlhf.config.roles import has_reward_model
from rlhf.config.schema.keys import (
    ABOVE_0,
    AT_LEAST_0,
    PART_KEYS,
    PROCESS_KEYS,
    SCORE,
    SECONDS,
    Names,
    key,
)
from rlhf.methods import REWARDS, add_keys_of_methods, installed_methods
from rlhf.options import RewardTermOptions
from rlhf.options.judges.keys import READ_BY_JUDGES
from rlhf.options.scorers.keys import READ_BY_SCORERS

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig

    AnyRewardKind = RewardKind
else:  # also the kinds of installed methods
    METHOD_KINDS = [kind for method in installed_methods() for kind in method.reward_kinds]
    CORE_KINDS = [kind.value for kind in RewardKind]
    AnyRewardKind = StrEnum("RewardKind", {kind: kind for kind in [*CORE_KINDS, *METHOD_KINDS]})


@dataclass(kw_only=True)
class RewardTermKeys:
    """Keys of one part of the score whose kind is the core's."""

    kind: AnyRewardKind
    """model, gold, function, http, judge, scorer, a rule (length, stop, pattern, exact, number,
    json), or a kind of an installed method."""
    weight: float = key(SCORE, default=1.0)
    """Factor of this part in the sum."""
    normalise: bool = False
    """Subtract the mean and divide by the deviation of all rollouts so far, before weighting."""
    columns: list[str] = field(default_factory=list)
    """Columns of the data that the part reads beside prompt and response."""
    timeout_seconds: float = key(SECONDS, default=30.0)
    """Seconds in which a batch must be scored; then the part's process is ended."""
    fallback: float | None = key(SCORE, default=None)
    """Score of a response that the part failed to score; null: the run ends."""
    function: str | None = None
    """kind=function: MODULE:FUNCTION, called as f(prompts, responses, **columns)."""
    run_code: bool = False
    """kind=function: agree to run this function's code; kind=scorer: the code of its folder."""
    sealed: str | None = None
    """kind=function, weight=0: auto, or the hash of code and files that the judge must have."""
    files: list[str] = field(default_factory=list)
    """Files and folders beside the module that a sealed judge reads when it is imported."""
    url: str | None = None
    """kind=http: address that gets prompts, responses and columns, and answers with scores;
    kind=judge: base of an API like OpenAI's, such as http://HOST:8000/v1."""
    token_variable: str | None = None
    """kind=http or judge: environment variable whose value is the bearer token; null: none."""
    batch_size: int | None = key(ABOVE_0, default=None)
    """kind=http: responses in a request; null: the rank's whole rollout. kind=judge: requests of
    a rank at the same time; null: 16."""
    retries: int = key(AT_LEAST_0, default=2)
    """kind=http or judge: further attempts after an error 5xx or a lost connection."""
    pattern: str | None = None
    """kind=pattern: regular expression; the score is 1 where it is found."""
    whole: bool = False
    """kind=pattern: the expression must match the whole response."""
    json_schema: str | None = key(default=None, names=Names.place)
    """kind=json: file of the JSON schema of a response; null: any JSON."""
    least: int = key(AT_LEAST_0, default=0)
    """kind=length: fewest response tokens with the full score."""
    most: int | None = key(ABOVE_0, default=None)
    """kind=length: most response tokens with the full score; null: no limit."""
    slack: int = key(AT_LEAST_0, default=0)
    """kind=length: tokens outside of least and most over which the score falls to 0."""


@add_keys_of_methods(REWARDS)
@dataclass(kw_only=True)
class RewardTerm(RewardTermOptions, RewardTermKeys):
    """Keys of one part of the score; docs/rewards.md lists the keys that each kind reads."""


AUTO = "auto"  # sealed=auto: the hash of the code and files at the start of the run
# The keys that each kind reads; a key with * must be set.
KEYS_BY_KIND = {
    RewardKind.model: PART_KEYS,
    RewardKind.gold: PART_KEYS,
    RewardKind.environment: ("kind", "weight"),
    RewardKind.function: (*PROCESS_KEYS, "function*", "run_code", "columns", "sealed", "files"),
    RewardKind.http: (*PROCESS_KEYS, "url*", "token_variable", "batch_size", "retries", "columns"),
    RewardKind.length: (*PROCESS_KEYS, "least", "most", "slack"),
    RewardKind.stop: PROCESS_KEYS,
    RewardKind.pattern: (*PROCESS_KEYS, "pattern*", "whole"),
    RewardKind.exact: (*PROCESS_KEYS, "columns*"),
    RewardKind.number: (*PROCESS_KEYS, "columns*"),
    RewardKind.json: (*PROCESS_KEYS, "json_schema"),
    RewardKind.judge: READ_BY_JUDGES,
    RewardKind.scorer: READ_BY_SCORERS,
    **{kind: keys for method in installed_methods() for kind, keys in method.reward_kinds.items()},
}
# What a key of a part is where the user has not set it.
DEFAULTS_OF_PART = {
    each.name: each.default if each.default_factory is MISSING else each.default_factory()
    for each in fields(RewardTerm)
}


def check_rewards(config: RunConfig) -> None:
    """Check every part of the score, and that the run has the models that the parts need."""
    source, parts = config.data.source, config.rewards
    for name, part in parts.items():
        if not name.isidentifier():
            raise ConfigError(f"rewards.{name}: a name has letters, digits and _ only")
        check_reward_term(f"rewards.{name}", part)
        others = [column for column in part.columns if column != "answer"]
        if others and source is Source.synthetic:
            raise ConfigError(
                f"rewards.{name}.columns=[{','.join(part.columns)}]: data=synthetic has no column "
                f"{others[0]}; its only column is answer"
            )
    kinds = {part.kind for part in parts.values()}
    broken = {
        f"rewards.{next(iter(parts), '')}.weight=0: every part has weight 0, so PPO has nothing to "
        "learn from; give one part another weight": (
            bool(kinds) and all(part.weight == 0 for part in parts.values())
        ),
        f"rewards with kind=gold and data.source={source}: the judge scores the prompts of the "
        "generated task only; use data=synthetic, or another kind": (
            RewardKind.gold in kinds and source is not Source.synthetic
        ),
        "rewards with kind=model and reward_model.init=gold: there is no reward model; use "
        "phase=pipeline, or model@reward_model=pretrained reward_model.path=FOLDER": (
            RewardKind.model in kinds and config.reward_model.init is ModelInit.gold
        ),
        "rewards without kind=model in a run with the reward phase: nothing would use the reward "
        "model; use phase=pipeline_rule, or add rewards.model={kind: model}": (
            bool(kinds) and Phase.reward in config.phase.order and not has_reward_model(config)
        ),
    }
    refuse_broken_rule(broken)


def check_reward_term(key: str, part: RewardTerm) -> None:
    """Check the keys and values of the part of the score that ``key`` names."""
    kind, read = part.kind, KEYS_BY_KIND[part.kind]
    required = {name.rstrip("*") for name in read if name.endswith("*")}
    names = [name.rstrip("*") for name in read]
    for declared in fields(part):
        value, default = getattr(part, declared.name), declared.default
        is_set = value != ([] if default is MISSING else default)
        broken = {
            f"{key}.{declared.name} is missing: kind={kind} needs it": (
                declared.name in required and not is_set
            ),
            f"{key}.{declared.name}={value}: kind={kind} does not read it; it reads "
            f"{', '.join(names)}": is_set and declared.name not in names,
        }
        refuse_broken_rule(broken)
    function, columns = part.function, part.columns
    broken = {
        f"{key}.columns=[{','.join(columns)}]: kind={kind} compares with one column": (
            kind in (RewardKind.exact, RewardKind.number) and len(columns) != 1
        ),
        f"{key}: kind=length needs least or most, in response tokens": (
            kind == RewardKind.length and part.most is None and part.least == 0
        ),
        f"{key}.most={part.most}: must be {key}.least={part.least} or more": (
            part.most is not None and part.most < part.least
        ),
        f"{key}.function={function}: must be MODULE:FUNCTION, such as my_rewards:brief": (
            function is not None and not re.fullmatch(r"[\w.]+:\w+", function)
        ),
        f"{key}.function={function}: runs code; if you have read it, add {key}.run_code=true": (
            function is not None and not part.run_code
        ),
        f"{key}.sealed={part.sealed}: must be auto, or the 64 digits in a run's config.yaml": (
            part.sealed is not None and not re.fullmatch(f"{AUTO}|[0-9a-f]{{64}}", part.sealed)
        ),
        f"{key}.weight={part.weight:g}: a sealed part is a judge, from which PPO does not learn; "
        f"use weight=0, or remove {key}.sealed": part.sealed is not None and part.weight != 0,
        f"{key}.files=[{','.join(part.files)}]: must be paths below the module's folder, of a part "
        "that sets sealed": (part.sealed is None and bool(part.files))
        or any(file.startswith("/") or ".." in file.split("/") for file in part.files),
    }
    refuse_broken_rule(broken)
    if part.url is not None:
        _check_url(f"{key}.url", part.url)
    try:
        re.compile(part.pattern or "")
    except re.error as error:
        raise ConfigError(
            f"{key}.pattern={part.pattern}: not a regular expression ({error})"
        ) from error


def _check_url(key: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        port = parts.port  # None: the default port of the scheme
    except ValueError as error:  # brackets without an IPv6 address, or a port that is no number
        raise ConfigError(f"{key}={url}: not an address ({error})") from error
    broken = {
        "must be http://HOST... or https://HOST...": (
            parts.scheme not in ("http", "https") or not parts.hostname
        ),
        "the port must be from 1 to 65535": port == 0,
        "must be ASCII without spaces; write %20 for a space": (
            not (url.isascii() and url.isprintable()) or " " in url
        ),
    }
    refuse_broken_rule(broken, f"{key}={url}: ")
