"""Rules for ``reward`` (what the loss reads) and ``rewards``, the parts of the score."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from urllib.parse import urlsplit

from rlhf.base.errors import ConfigError, refuse_first
from rlhf.config.choices import ModelInit, Phase, RewardKind, RewardLossName, Source
from rlhf.config.roles import has_reward_model
from rlhf.config.schema.rewards import RewardTerm
from rlhf.config.schema.run import RunConfig
from rlhf.options import RewardConfig

OF_ALL = ("kind", "weight", "normalise")
OF_PROCESSES = (*OF_ALL, "timeout_seconds", "fallback")
# The keys that each kind reads; a key with * must be set.
READ = {
    RewardKind.model: OF_ALL,
    RewardKind.gold: OF_ALL,
    RewardKind.environment: ("kind", "weight"),
    RewardKind.function: (*OF_PROCESSES, "function*", "run_code", "columns"),
    RewardKind.http: (*OF_PROCESSES, "url*", "token_variable", "batch_size", "retries", "columns"),
    RewardKind.length: (*OF_PROCESSES, "least", "most", "slack"),
    RewardKind.stop: OF_PROCESSES,
    RewardKind.pattern: (*OF_PROCESSES, "pattern*", "whole"),
    RewardKind.exact: (*OF_PROCESSES, "columns*"),
    RewardKind.number: (*OF_PROCESSES, "columns*"),
    RewardKind.json: (*OF_PROCESSES, "json_schema"),
}


def check_reward(config: RunConfig) -> None:
    """Check what the reward model's loss reads."""
    if Phase.reward in config.phase.order:
        _check_loss(config.reward, config.data.source)


def _check_loss(reward: RewardConfig, source: Source) -> None:
    """Check that the loss has the columns that it reads, and no option that it does not read."""
    columns = reward.score_columns
    is_regression = reward.loss is RewardLossName.regression
    key = "label_smoothing" if reward.margin_column is None else "margin_column"
    broken = {
        f"reward.loss=regression with reward.score_columns={columns}: it needs two columns with "
        "numbers, such as reward.score_columns=[score_chosen,score_rejected]": (
            is_regression and len(columns or ()) != 2  # noqa: PLR2004
        ),
        f"reward.score_columns={columns}: only reward.loss=regression reads them; add "
        "reward.loss=regression, or use reward.margin_column": (
            columns is not None and not is_regression
        ),
        f"reward.{key}={getattr(reward, key)}: a squared error has none; remove it, or use "
        "reward.loss=end": (
            is_regression and (reward.margin_column is not None or reward.label_smoothing > 0)
        ),
        f"reward.label_noise={reward.label_noise}: reward.loss=regression reads scores, not which "
        "answer was preferred; remove it, or use reward.loss=end": (
            is_regression and reward.label_noise > 0
        ),
    }
    refuse_first(broken)
    wanted = [*(columns or ()), *filter(None, [reward.margin_column])]
    if wanted and source in (Source.synthetic, Source.environment):
        key = "margin_column" if columns is None else "score_columns"
        raise ConfigError(
            f"reward.{key}: data=synthetic and environments have no column {wanted[0]}; use "
            "data=local data.path=FILE"
        )


def check_rewards(config: RunConfig) -> None:
    """Check every part of the score, and that the run has the models that the parts need."""
    for name, part in config.rewards.items():
        if not name.isidentifier():
            raise ConfigError(f"rewards.{name}: a name has letters, digits and _ only")
        check_reward_term(f"rewards.{name}", part)
        others = [column for column in part.columns if column != "answer"]
        if others and config.data.source is Source.synthetic:
            raise ConfigError(
                f"rewards.{name}.columns=[{','.join(part.columns)}]: data=synthetic has no column "
                f"{others[0]}; it has answer"
            )
    kinds = {part.kind for part in config.rewards.values()}
    source = config.data.source
    broken = {
        f"rewards.{next(iter(config.rewards), '')}.weight=0: every part is a judge, which PPO does "
        "not learn from; give one part another weight": (
            bool(kinds) and all(part.weight == 0 for part in config.rewards.values())
        ),
        f"rewards with kind=gold and data.source={source}: the judge scores the prompts of the "
        "generated task only; use data=synthetic, or another kind": (
            RewardKind.gold in kinds and source is not Source.synthetic
        ),
        "rewards with kind=model and reward_model.init=gold: there is no reward model; use "
        "phase=pipeline, or model@reward_model=pretrained reward_model.path=FOLDER": (
            RewardKind.model in kinds and config.reward_model.init is ModelInit.gold
        ),
        "rewards without kind=model in a run with the reward phase: nothing would read the reward "
        "model; use phase=pipeline_rule, or add rewards.model={kind: model}": (
            bool(kinds) and Phase.reward in config.phase.order and not has_reward_model(config)
        ),
    }
    refuse_first(broken)


def check_reward_term(key: str, part: RewardTerm) -> None:
    """Check the keys and values of the part of the score that ``key`` names."""
    _check_keys(key, part)
    _check_values(key, part)


def _check_keys(key: str, part: RewardTerm) -> None:
    """Check that the part sets all keys that its kind needs, and no key that it does not read."""
    read = READ[part.kind]
    for each in fields(part):
        default = each.default if each.default is not MISSING else []
        is_set = getattr(part, each.name) != default
        if f"{each.name}*" in read and not is_set:
            raise ConfigError(f"{key}.{each.name} is missing: kind={part.kind} needs it")
        if is_set and each.name not in read and f"{each.name}*" not in read:
            names = ", ".join(name.rstrip("*") for name in read)
            raise ConfigError(
                f"{key}.{each.name}={getattr(part, each.name)}: kind={part.kind} does not read it; "
                f"it reads {names}"
            )


def _check_values(key: str, part: RewardTerm) -> None:
    if part.kind in (RewardKind.exact, RewardKind.number) and len(part.columns) != 1:
        raise ConfigError(
            f"{key}.columns=[{','.join(part.columns)}]: kind={part.kind} compares with one column"
        )
    if part.kind is RewardKind.length and part.most is None and part.least == 0:
        raise ConfigError(f"{key}: kind=length needs least or most, in response tokens")
    if part.most is not None and part.most < part.least:
        raise ConfigError(f"{key}.most={part.most}: must be {key}.least={part.least} or more")
    if part.pattern is not None:
        try:
            re.compile(part.pattern)
        except re.error as error:
            raise ConfigError(
                f"{key}.pattern={part.pattern}: not a regular expression ({error})"
            ) from error
    if part.url is not None:
        _check_url(f"{key}.url", part.url)
    if part.function is not None:
        if not re.fullmatch(r"[\w.]+:\w+", part.function):
            raise ConfigError(
                f"{key}.function={part.function}: must be MODULE:FUNCTION, such as my_rewards:brief"
            )
        if not part.run_code:
            raise ConfigError(
                f"{key}.function={part.function} runs code; if you have read it, add "
                f"{key}.run_code=true"
            )


def _check_url(key: str, url: str) -> None:
    """Check that a request can be sent to ``url``."""
    try:
        place = urlsplit(url)
        port = place.port  # None: the default port of the scheme
    except ValueError as error:  # brackets without an IPv6 address, or a port that is no number
        raise ConfigError(f"{key}={url}: not an address ({error})") from error
    if place.scheme not in ("http", "https") or not place.hostname:
        raise ConfigError(f"{key}={url}: must be http://HOST... or https://HOST...")
    if port == 0:
        raise ConfigError(f"{key}={url}: the port must be from 1 to 65535")
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise ConfigError(f"{key}={url}: must be ASCII without spaces; write %20 for a space")
