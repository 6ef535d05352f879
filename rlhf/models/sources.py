"""The place from which a model is loaded, with its options, errors and known config."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf.base.errors import CheckpointError
from rlhf.base.user_paths import NOT_PULLED, expand_user_path, find_lfs_pointer
from rlhf.config.choices import ModelInit
from rlhf.config.schema.model import ModelConfig

# No config key names a folder that a run wrote: error messages have this name instead of a key.
RUN_FOLDER = "run folder"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The place of a model, and options to build it; errors name the config key ``key``."""

    key: str
    path: str | None
    revision: str | None = None
    architecture: dict[str, Any] | None = None
    attention: str | None = None
    dropout: float = 0.0
    gradient_checkpointing: bool | int = False  # an int n: only the first n layers
    compiles: bool = False
    trust_remote_code: bool = False

    @classmethod
    def from_config(cls, model: ModelConfig, *, key: str, dropout: float = 0.0) -> ModelSource:
        """Return the source that ``model`` describes; ``path`` is None if weights are random."""
        is_random = model.init is ModelInit.random
        place = None if is_random else model.path
        return cls(
            key=f"{key}.architecture" if is_random else f"{key}.path",
            path=place and str(expand_user_path(place, key=f"{key}.path")),
            revision=model.revision,
            architecture=model.architecture if is_random else None,
            attention=model.attention,
            dropout=dropout,
            gradient_checkpointing=model.gradient_checkpointing,
            compiles=model.compile,
            trust_remote_code=model.trust_remote_code,
        )

    @classmethod
    def from_folder(cls, folder: Path, *, base: ModelConfig) -> ModelSource:
        """Return the source of a model in ``folder`` that a run has trained from ``base``."""
        return cls(
            key=RUN_FOLDER,
            path=str(folder),
            attention=base.attention,
            compiles=base.compile,
            trust_remote_code=base.trust_remote_code,
        )

    def build_error(self, reason: str, *, what: str = "a model") -> CheckpointError:
        """Return the error to raise if ``path`` does not hold ``what``."""
        return build_load_error(self.path, reason, key=self.key, what=what)


def build_load_error(
    place: str | Path | None, reason: str, *, key: str, what: str
) -> CheckpointError:
    """Return the error to raise if ``place``, the value of ``key``, does not hold ``what``."""
    folder = Path(str(place))
    if pointer := find_lfs_pointer(file for file in folder.glob("*") if file.is_file()):
        reason = f"{pointer.name} {NOT_PULLED}"
    if "custom code" in reason:
        group = "model" if key == RUN_FOLDER else key.rpartition(".")[0] or key
        switch = "run_code" if key.startswith("rewards.") else "trust_remote_code"
        return CheckpointError(
            f"{key}={place} contains code, which does not run unless you trust it: read "
            f"it, then switch on {group}.{switch}"
        )
    if key == RUN_FOLDER:
        return _build_damaged_run_error(folder, reason, what=what)
    if folder.is_dir():
        is_tokenizer = what == "a tokenizer" and not key.startswith("rewards.")
        other_way = f". Or set {key.partition('.')[0]}.tokenizer=FOLDER" if is_tokenizer else ""
        return CheckpointError(
            f"{key}={place} does not hold {what}: a Hugging Face folder has config.json, "
            f"safetensors weights and tokenizer files; found {_list_file_names(folder)} ({reason})"
            f"{other_way}"
        )
    needs_weights = key.startswith("rewards.")
    other_way = "" if needs_weights else ", or for a model without weights set model.init=random"
    return CheckpointError(
        f"{key}={place} is not a local folder, and {what} could not be loaded from the hub under "
        f"that name ({reason}). Give the path of a downloaded folder{other_way}"
    )


def _build_damaged_run_error(folder: Path, reason: str, *, what: str) -> CheckpointError:
    """Return the error for a missing or damaged folder that its run can write again."""
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


def config_fields(
    model: ModelConfig, *, key: str = "model", is_base: bool = False
) -> dict[str, Any]:
    """Return the known fields of a model's HF config; empty if none are known.

    Random weights use ``architecture``. Pretrained weights use config.json in their folder or, for
    a hub id, the published fields in ``architecture`` or config.json in the hub cache. For an
    adapter, return the fields of its base model; with ``is_base``, follow no further base.
    """
    if model.init is ModelInit.random:
        return dict(model.architecture)
    folder = expand_user_path(str(model.path), key=f"{key}.path")
    if (folder / "config.json").is_file():
        return _read_json(folder / "config.json")
    base = _read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    if isinstance(base, str) and base.strip() and not is_base:
        return config_fields(replace(model, path=base), key=key, is_base=True)
    if "model_type" in model.architecture:
        return dict(model.architecture)
    return _read_cached_config(model)


def _read_cached_config(model: ModelConfig) -> dict[str, Any]:
    """Read config.json of a hub id from the hub cache; return {} if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(str(model.path), "config.json", revision=model.revision)
    except ValueError:  # the path is not a hub id
        return {}
    return _read_json(Path(file)) if isinstance(file, str) else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
