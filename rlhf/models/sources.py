"""Errors for checkpoints that cannot be loaded."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from rlhf.errors import CheckpointError

# What transformers raises for folders that it cannot read: some of its code takes the content of
# their JSON files for granted.
UNREADABLE = (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError)


def explain_load_failure(
    place: str | Path, *, key: str, what: str, error: Exception
) -> CheckpointError:
    """Return the error to raise if ``place``, the value of ``key``, does not hold ``what``."""
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "custom code" in first_line:
        group = key.rpartition(".")[0] or key
        return CheckpointError(
            f"{key}={place} contains code of its own, which does not run unless you trust it: read "
            f"it, then switch on {group}.trust_remote_code"
        )
    folder = Path(place)
    if folder.is_dir():
        found = ", ".join(sorted(item.name for item in folder.iterdir())[:8]) or "nothing"
        return CheckpointError(
            f"{key}={place} does not hold {what}: a Hugging Face folder has config.json, "
            f"safetensors weights and tokenizer files; found {found} ({first_line})"
        )
    return CheckpointError(
        f"{key}={place} is not a local folder, and {what} could not be loaded from the hub under "
        f"that name ({first_line}). Give the path of a downloaded folder, or for a model without "
        "weights set model.init=random"
    )
