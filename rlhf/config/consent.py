"""Consent to run code of others: it comes from the command, never from the folder that needs it."""

from __future__ import annotations

import re
from pathlib import Path

from rlhf.base.errors import ConfigError
from rlhf.config.freeze import frozen_keys

OF_MODELS = r"(model|reward_model)\.trust_remote_code"
ANY = rf"{OF_MODELS}|(environment|rewards\..+)\.run_code"


def keys_that_run_code(run_dir: Path, keys: str = ANY) -> list[str]:
    """Return the keys, of those that match ``keys``, with which a run let code of others run."""
    found = frozen_keys(run_dir).items()
    return [key for key, value in found if value and re.fullmatch(keys, key, re.DOTALL)]


def refuse_code_of_run(run_dir: Path, *, trusts_code: bool, keys: str = ANY) -> None:
    """Check that the command itself trusts the code that the configuration of a run names."""
    if (found := keys_that_run_code(run_dir, keys)) and not trusts_code:
        raise ConfigError(
            f"{run_dir}: its configuration names code to run ({', '.join(found)}), which runs only "
            "if the command says so: read that code, then add --trust-code"
        )
