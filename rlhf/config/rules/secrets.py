"""Refuse passwords and access tokens in a command, whose values are stored and reported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rlhf.config.schema.run import RunConfig
from rlhf.errors import ConfigError
from rlhf.safe_text import FORMS, redact

# How to pass each kind of secret without a configuration.
SECRETS = {
    "a Hugging Face token": "set HF_TOKEN, or type: hf auth login",
    "an API key": "set an environment variable",
    "a W&B key": "set WANDB_API_KEY",
    "a GitHub token": "set an environment variable",
    "an AWS key": "set AWS_ACCESS_KEY_ID",
    "a password in an address": "download the file first",
}


def check_secrets(config: RunConfig) -> None:
    """Check that no text of the configuration looks like a secret; the error does not repeat it."""
    for key, text in _texts(asdict(config), ""):
        if key.endswith(".revision"):  # a commit has the form of a W&B key
            continue
        for name, way_out in SECRETS.items():
            if re.search(FORMS[name], text):
                raise ConfigError(
                    f"{key}: the value looks like {name}. A configuration is stored in the run "
                    f"directory and shown in reports, so it must not hold secrets; {way_out}"
                )


def refuse_secrets(words: Iterable[str], environment: Mapping[str, str]) -> None:
    """Check that no word of a command is a secret: Hydra stores them before they are composed.

    Raises:
        ConfigError: naming the key without the secret.
    """
    for word in words:
        if (shown := redact(word, environment)) != word:
            raise ConfigError(
                f"{shown}: looks like a key or a password, and commands are stored and shown in "
                "reports; leave it out, and let the library that needs it read it from the "
                "environment (HF_TOKEN, WANDB_API_KEY) or from ~/.netrc"
            )


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the text of every string in nested mappings and lists."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _texts(each, f"{key}.{name}".lstrip("."))
            yield key, str(name)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, key)
    elif isinstance(value, str):
        yield key, value
