"""Checks for keys on the command line that have no effect because of another key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser

from rlhf.config.choices import ModelInit, Source
from rlhf.config.schema.run import RunConfig
from rlhf.errors import ConfigError


class Unread(NamedTuple):
    """Keys that have no effect if ``holds``; ``way_out`` may contain ``{path}``."""

    keys: tuple[str, ...]
    holds: Callable[[RunConfig], bool]
    reason: str
    way_out: str


OF_THE_SFT_MODEL = (
    "path revision tokenizer end_token vocab_size architecture attention trust_remote_code"
).split()
OF_FILES = ("sets", "eval_path", "subset", "revision", "train_split", "eval_split")
OF_ADAPTERS = (
    "alpha dropout target_modules roles train_rest lr critic_rank critic_lr export"
).split()

RULES = (
    Unread(
        ("model.path", "model.revision"),
        lambda config: config.model.init is ModelInit.random,
        "model.init=random makes the model from model.architecture",
        "use model=pretrained model.path={path}",
    ),
    Unread(
        ("model.architecture",),
        lambda config: config.model.init is ModelInit.pretrained,
        "model.init=pretrained loads the model that model.path names",
        "remove model.architecture, or use model=tiny",
    ),
    Unread(
        ("reward_model.path", "reward_model.revision"),
        lambda config: config.reward_model.init is ModelInit.random,
        "reward_model.init=random makes the model from reward_model.architecture",
        "use model@reward_model=pretrained reward_model.path={path}",
    ),
    Unread(
        ("reward_model.architecture",),
        lambda config: config.reward_model.init is ModelInit.pretrained,
        "reward_model.init=pretrained loads the model that reward_model.path names",
        "remove reward_model.architecture, or use model@reward_model=tiny",
    ),
    Unread(
        tuple(f"reward_model.{name}" for name in OF_THE_SFT_MODEL),
        lambda config: config.reward_model.init.is_of_sft,
        "reward_model.init=sft and gold start from the SFT model of the same run",
        "use model@reward_model=pretrained reward_model.path={path}",
    ),
    Unread(
        tuple(f"data.{name}" for name in OF_FILES),
        lambda config: config.data.source is Source.synthetic,
        "data.source=synthetic generates the examples",
        "use data=local or data=hub with data.path=FILE_OR_HUB_ID",
    ),
    Unread(
        tuple(f"lora.{name}" for name in OF_ADAPTERS),
        lambda config: config.lora.rank == 0,
        "lora.rank=0 trains without adapters",
        "add lora=default",
    ),
)


def refuse_unread(config: RunConfig, overrides: Sequence[str]) -> None:
    """Raise an error if an override sets a key that ``config`` does not read.

    Only keys on the command line count: options and experiments may set keys for other choices.
    """
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, value = override.key_or_group, override.value()
        for rule in RULES:
            is_below = f"{key}.".startswith(tuple(f"{name}." for name in rule.keys))
            if value is None or not is_below or not rule.holds(config):  # null has no effect anyway
                continue
            way_out = rule.way_out.format(path=value if key.endswith(".path") else "FOLDER_OR_ID")
            raise ConfigError(
                f"{override.input_line}: {rule.reason} and does not read {key}; {way_out}"
            )
