"""Refuse passwords and access tokens in a configuration, which is stored, logged and reported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rlhf.config.schema.run import RunConfig
from rlhf.errors import ConfigError

# The form of each secret, and how to pass it without a configuration.
SECRETS = {
    "a Hugging Face token": (r"\bhf_[A-Za-z0-9]{20,}", "set HF_TOKEN, or type: hf auth login"),
    "an API key": (r"\bsk-[A-Za-z0-9_-]{20,}", "set an environment variable"),
    "a W&B key": (r"\bwandb_v1_\w{20,}|\A[0-9a-f]{40}\Z", "set WANDB_API_KEY"),
    "a GitHub token": (r"\b(gh[pousr]_|github_pat_)\w{20,}", "set an environment variable"),
    "an AWS key": (r"\bAKIA[A-Z0-9]{16}\b", "set AWS_ACCESS_KEY_ID"),
    "a password in an address": (r"://[^/\s:@]+:[^/\s@]+@", "download the file first"),
}


def check_secrets(config: RunConfig) -> None:
    """Check that no text of the configuration looks like a secret; the error does not repeat it."""
    for key, text in _texts(asdict(config), ""):
        if key.endswith(".revision"):  # a commit has the form of a W&B key
            continue
        for name, (form, way_out) in SECRETS.items():
            if re.search(form, text):
                raise ConfigError(
                    f"{key}: the value looks like {name}. A configuration is stored in the run "
                    f"directory and shown in reports, so it must not hold secrets; {way_out}"
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
