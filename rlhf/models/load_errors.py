"""Errors for models and tokenizers that cannot be loaded."""

from __future__ import annotations

from pathlib import Path

from rlhf.base.errors import CheckpointError

# Stands for a config key in errors about folders that a run wrote itself, which no key names.
RUN_FOLDER = "run folder"


def load_failure(place: str | Path | None, reason: str, *, key: str, what: str) -> CheckpointError:
    """Return the error to raise if ``place``, the value of ``key``, does not hold ``what``."""
    folder = Path(str(place))
    if "custom code" in reason:
        group = "model" if key == RUN_FOLDER else key.rpartition(".")[0] or key
        return CheckpointError(
            f"{key}={place} contains code of its own, which does not run unless you trust it: read "
            f"it, then switch on {group}.trust_remote_code"
        )
    if key == RUN_FOLDER:
        return _damaged_run_error(folder, reason, what=what)
    if folder.is_dir():
        return CheckpointError(
            f"{key}={place} does not hold {what}: a Hugging Face folder has config.json, "
            f"safetensors weights and tokenizer files; found {_list_file_names(folder)} ({reason})"
        )
    return CheckpointError(
        f"{key}={place} is not a local folder, and {what} could not be loaded from the hub under "
        f"that name ({reason}). Give the path of a downloaded folder, or for a model without "
        "weights set model.init=random"
    )


def _damaged_run_error(folder: Path, reason: str, *, what: str) -> CheckpointError:
    """Return the error for a missing or damaged folder that a run wrote and can write again."""
    is_tokenizer = folder.name == "tokenizer"  # RUN_DIR/tokenizer; models are RUN_DIR/PHASE/NAME
    run_dir = folder.parent if is_tokenizer else folder.parent.parent
    state = "is missing"
    if folder.is_dir():
        state = f"does not hold {what}: found {_list_file_names(folder)} ({reason})"
    return CheckpointError(
        f"{folder} {state}. The run wrote it, so it was "
        "removed or damaged later: restore it from a copy, or make it again: remove "
        f"{folder if is_tokenizer else folder.parent / 'result.json'} if it is there, then "
        f"python launch.py resume={run_dir}"
    )


def _list_file_names(folder: Path) -> str:
    return ", ".join(sorted(item.name for item in folder.iterdir())[:8]) or "nothing"
