"""Find the safetensors files of a model, and read the names and dtypes of their tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.base.errors import CheckpointError
from rlhf.models.sources import ModelSource

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Names of masks and positions, which old versions of transformers saved; models compute them.
CONSTANTS = re.compile(r"(^|\.)(attn|attention)\.bias$|masked_bias$|position_ids$|\.inv_freq$")
SHARDS = "shard-?????-model-?????-of-?????.safetensors"  # files of a distributed checkpoint
MOST_NAMES = 3  # maximum number of tensors to name in an error


def stored_dtype(source: ModelSource) -> torch.dtype:
    """Return the dtype of the stored weights of ``source``; fp32 if they are mixed or fp64.

    transformers memory-maps tensors only if it loads them in the dtype of their file.
    """
    types = set(stored_tensor_dtypes(source).values())
    dtype = FLOATS[types.pop()] if len(types) == 1 else torch.float32
    return torch.float32 if dtype is torch.float64 else dtype


def stored_tensor_dtypes(source: ModelSource) -> dict[str, str]:
    """Return the safetensors dtype of each tensor of ``source``, without masks and positions.

    Raises:
        CheckpointError: if the files do not match their index, or a dtype is not one of ``FLOATS``.
        Exception: any error of safetensors or transformers if a file cannot be read.
    """
    files, index = _weight_files(source)
    types: dict[str, str] = {}
    places: dict[str, str] = {}
    for path in files:
        types |= (dtypes := dtypes_in_file(path))
        places |= dict.fromkeys(dtypes, Path(path).name)
    if index is not None and index != places:
        wrong = sorted(dict(index.items() ^ places.items()))
        raise source.build_error(
            "model.safetensors.index.json and the files that it names disagree about "
            f"{summarize_names(wrong)}"
        )
    types = {name: dtype for name, dtype in types.items() if not CONSTANTS.search(name)}
    require_float_dtypes(types, source)
    return types


def dtypes_in_file(path: str) -> dict[str, str]:
    """Return the safetensors dtype of each tensor in a file."""
    from safetensors import safe_open

    with safe_open(path, "pt") as tensors:
        return {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118


def require_float_dtypes(types: Mapping[str, str], source: ModelSource) -> None:
    """Raise a CheckpointError if there are no tensors, or a dtype is not one of ``FLOATS``."""
    odd = [f"{name} ({dtype})" for name, dtype in types.items() if dtype not in FLOATS]
    if odd or not types:
        raise source.build_error(
            f"weights must be of type {', '.join(FLOATS)}; found "
            f"{summarize_names(odd) or 'none'}. Use the unquantised model"
        )


def require_finite_weights(name: str, weights: Tensor, source: ModelSource) -> None:
    """Raise a CheckpointError if ``weights``, called ``name``, hold NaN or an infinite value."""
    # aminmax needs no memory and is seven times as fast as isfinite; any NaN makes it return NaN.
    if weights.numel() and not torch.stack(torch.aminmax(weights)).isfinite().all():
        raise CheckpointError(
            f"{source.key}={source.path}: {name} holds NaN or an infinite value as "
            f"{str(weights.dtype).removeprefix('torch.')}; must be finite. The training that wrote "
            "it diverged, or the file is damaged: use another checkpoint, or download it again"
        )


def summarize_names(names: Iterable[str]) -> str:
    """Return text with the first ``MOST_NAMES`` sorted names, and the number of the others."""
    ordered = sorted(names)
    suffix = f" and {len(ordered) - MOST_NAMES} more" if len(ordered) > MOST_NAMES else ""
    return ", ".join(ordered[:MOST_NAMES]) + suffix


def _weight_files(source: ModelSource) -> tuple[list[str], Mapping[str, str] | None]:
    """Return the paths of the weight files, and the index (tensor -> file name) or None."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
    from transformers.utils.hub import cached_files

    place, revision = str(source.path), source.revision
    if shards := sorted(Path(place).glob(SHARDS)):
        raise source.build_error(f"{shards[0].name} is part of a distributed checkpoint")
    path = cached_file(
        place, SAFE_WEIGHTS_NAME, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    if path is not None:
        return [path], None
    file = cached_file(place, SAFE_WEIGHTS_INDEX_NAME, revision=revision)
    index = _parse_index(json.loads(Path(file).read_text(encoding="utf-8")), source)
    names = sorted(set(index.values()))
    return cached_files(place, names, revision=revision), index


def _parse_index(index: Any, source: ModelSource) -> dict[str, str]:
    """Return the file name of each tensor in an index; raise CheckpointError if it is malformed."""
    parts = index if isinstance(index, dict) else {}
    files, metadata = parts.get("weight_map"), parts.get("metadata")
    if not isinstance(files, dict) or not files or not isinstance(metadata, dict):
        raise source.build_error("model.safetensors.index.json must have metadata and a weight_map")
    for tensor, name in files.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise source.build_error(
                f"weight_map in model.safetensors.index.json has {tensor}={str(name)[:80]!r}; must "
                "be a file of the same folder"
            )
    return files
