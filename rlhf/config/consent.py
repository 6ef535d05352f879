"""Require consent before a command uses the code or outside resources that a run's config names.

The command gives consent, never a file in the run directory. If a command of this user has written
the same configuration, this user has named all that is in it: addresses, environment variables,
data and models outside of the run then need no consent. Code still needs consent, except with
``others_only``, which resume passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rlhf.base.cpu import cache_folder
from rlhf.base.errors import ConfigError
from rlhf.base.stored_files import INPUTS, find_entries
from rlhf.base.trust import is_remembered
from rlhf.base.user_paths import expand_user_path
from rlhf.config.freeze import COMMAND, FROZEN, read_command, read_frozen_keys
from rlhf.methods import patterns_of_places
from rlhf.options import Backend

# Patterns of the keys that let a run execute code from models, environments and users.
MODEL_CODE = r"(model|reward_model)\.trust_remote_code"
ALL_CODE = rf"{MODEL_CODE}|(environment|rewards\..+)\.run_code"
# Pattern of the keys that name files, models, addresses and variables outside of the run.
OUTSIDE = (
    r"data\.(path|eval_path|ptx_path|cache_dir|sets\..+\.path)|reward\.groups_path|environment\.id|"
    r"(model|reward_model)\.(path|tokenizer)|zero\.nvme_path|"
    r"rewards\..+\.(url|token_variable|rubric|json_schema|path)|rollout\.server\.(url|weights_dir)|"
    r"launcher\.(hostfile|master_addr)|tracking\.(others|entity)"
)
ADAPTERS = "*/*/adapter_config.json"  # names the base model of the adapter beside it


def keys_that_run_code(run_dir: Path, pattern: str = ALL_CODE) -> list[str]:
    """Return the keys of a run that match ``pattern`` and let the run execute code."""
    frozen_items = read_frozen_keys(run_dir).items()
    return [key for key, value in frozen_items if value and re.fullmatch(pattern, key, re.DOTALL)]


def keys_that_need_consent(run_dir: Path, *, models_only: bool = False) -> list[str]:
    """Return a run's keys and files that name code, or resources outside of the run.

    With ``models_only``, return only keys and files that are used to load the run's models.
    """
    code = keys_that_run_code(run_dir, MODEL_CODE if models_only else ALL_CODE)
    if is_remembered(run_dir / FROZEN):
        return code
    adapters = sorted(str(path.relative_to(run_dir)) for path in find_entries(run_dir, ADAPTERS))
    return [*code, *adapters, *(() if models_only else _find_what_reaches_outside(run_dir))]


def _find_what_reaches_outside(run_dir: Path) -> Iterator[str]:
    if (run_dir / INPUTS).exists():
        yield INPUTS.name
    if any("${" in word for word in read_command(run_dir)):  # may read environment variables
        yield COMMAND
    keys, outside = read_frozen_keys(run_dir), "|".join([OUTSIDE, *patterns_of_places()])
    for key, value in keys.items():
        is_cache = key == "data.cache_dir" and expand_user_path(value, key=key) == cache_folder()
        is_unread = (
            key.startswith("rollout.server.") and keys.get("rollout.backend") != Backend.vllm_server
        )
        if value and re.fullmatch(outside, key, re.DOTALL) and not is_cache and not is_unread:
            yield key


def require_consent(
    run_dir: Path,
    *,
    is_given: bool,
    models_only: bool = False,
    others_only: bool = False,
    fix: str = "--trust-run",
) -> None:
    """Raise a ConfigError if a run has keys that need consent, and consent is not given.

    ``models_only``: the command only loads models of the run. ``others_only``: no consent is needed
    if a command of this user wrote the configuration. ``fix``: the option that gives consent.
    """
    if is_given or (others_only and is_remembered(run_dir / FROZEN)):
        return
    if named := keys_that_need_consent(run_dir, models_only=models_only):
        raise ConfigError(
            f"{run_dir}: its configuration names code, or things outside the run "
            f"({', '.join(named)}), which need your consent: read {FROZEN} and that code, then add "
            f"{fix}"
        )
