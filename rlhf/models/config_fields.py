"""Find the fields of a model's Hugging Face config, without a download."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import ModelInit
from rlhf.config.schema.model import ModelConfig


def config_fields(
    model: ModelConfig, *, key: str = "model", is_base: bool = False
) -> dict[str, Any]:
    """Return the known fields of a model's HF config; empty if none are known.

    Random weights use ``architecture``. Pretrained weights use config.json in their folder or, for
    a hub id, the published fields in ``architecture`` or config.json in the hub cache. Of an
    adapter they are the fields of its base (``is_base``), which must be no adapter itself.
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
        found = try_to_load_from_cache(str(model.path), "config.json", revision=model.revision)
    except ValueError:  # the path is not a hub id
        return {}
    return _read_json(Path(found)) if isinstance(found, str) else {}


def _read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file, or {} if the file holds no mapping."""
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
