"""Refuse passwords and access tokens in a command, whose values are stored and reported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rlhf.base.errors import ConfigError
from rlhf.base.safe_text import FORMS, redact
from rlhf.config.schema.run import RunConfig

# For each kind of secret, how to pass it without writing it into the configuration.
WAYS_OUT = {
    "a Hugging Face token": "set HF_TOKEN, or type: hf auth login",
    "a W&B key": "set WANDB_API_KEY",
    "an AWS key": "set AWS_ACCESS_KEY_ID",
    "a password in an address": "download the file first",
    "a token in an address": "download the file first",
    "a key in an address": "download the file first",
}
READ_VARIABLE = r"""\$\{\s*oc\.env\s*:\s*["'\\]*(\w+)"""


def check_secrets(texts: Iterable[tuple[str, str]]) -> None:
    """Check that no text looks like a secret; the error names the key but not the secret.

    ``texts`` are pairs of a key and its text.
    """
    forms = {name: re.compile(form) for name, form in FORMS.items()}
    for key, text in texts:
        if key.endswith(".revision"):  # a commit has the form of a W&B key
            continue
        for name, form in forms.items():
            if form.search(text):
                raise ConfigError(
                    f"{key}: the value looks like {name}. A configuration is stored in the run "
                    "directory and shown in reports, so it must not hold secrets; "
                    f"{WAYS_OUT.get(name, 'set an environment variable')}"
                )


def refuse_secret_values(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Check that no value is a secret, also if an interpolation read it from ``environment``."""
    refuse_secrets_in_command(
        (f"{k}={text}" for k, text in iterate_texts(asdict(config), "")), environment
    )


def refuse_secrets_in_command(words: Iterable[str], environment: Mapping[str, str]) -> None:
    """Check that no word of a command has or reads a secret, because Hydra stores the words."""
    for word in words:
        read = re.sub(READ_VARIABLE, lambda found: environment.get(found[1], ""), word)
        if any(redact(text, environment) != text for text in (word, read)):
            raise ConfigError(
                f"{redact(word, environment)}: is or holds a key or a password, and commands and "
                "configurations are stored and shown in reports; leave it out, and let the "
                "library that needs it read it from the environment (HF_TOKEN, WANDB_API_KEY) or "
                "from ~/.netrc"
            )


def iterate_texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the text of every name and value in nested mappings and lists."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from iterate_texts(each, f"{key}.{name}".lstrip("."))
            yield key, str(name)
    elif isinstance(value, list):
        for each in value:
            yield from iterate_texts(each, key)
    elif value is not None:
        yield key, str(value)
