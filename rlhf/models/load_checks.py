"""Check that a folder holds the whole model that its config describes; name what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhf.errors import CheckpointError
from rlhf.foreign_errors import translated

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Not keys of the configuration: folders that a run has written.
OF_A_RUN = ("model folder", "run tokenizer", "exported model")
FLOATS = {"F64", "F32", "F16", "BF16"}  # dtypes of safetensors files that hold weights as they are
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
SHOWN = 3  # names in a message


def loading(place: str | Path, *, key: str, what: str) -> AbstractContextManager[None]:
    """Return a context that turns errors of libraries into one that names ``place``.

    Raises:
        CheckpointError: from the context, if ``place``, the value of ``key``, does not hold
            ``what``.
    """
    return translated(lambda reason: _load_error(place, key=key, what=what, reason=reason))


def _load_error(place: str | Path, *, key: str, what: str, reason: str) -> CheckpointError:
    folder = Path(place)
    if "custom code" in reason:
        group = key.rpartition(".")[0] or key
        return CheckpointError(
            f"{key}={place} contains code of its own, which does not run unless you trust it: read "
            f"it, then switch on {group}.trust_remote_code"
        )
    if key in OF_A_RUN:
        state = "is damaged" if folder.is_dir() else "is missing"
        return CheckpointError(
            f"{folder} {state} ({reason}): a phase of the run wrote it. Restore it, or remove "
            "result.json beside it and resume the run, which trains that phase again"
        )
    if folder.is_dir():
        found = ", ".join(sorted(item.name for item in folder.iterdir())[:8]) or "nothing"
        return CheckpointError(
            f"{key}={place} does not hold {what}: a Hugging Face folder has config.json, "
            f"safetensors weights and tokenizer files; found {found} ({reason})"
        )
    return CheckpointError(
        f"{key}={place} is not a local folder, and {what} could not be loaded from the hub under "
        f"that name ({reason}). Give the path of a downloaded folder, or for a model without "
        "weights set model.init=random"
    )


def merging(path: str, *, key: str, base: str) -> AbstractContextManager[None]:
    """Return a context that turns errors of merging an adapter into one that names its base.

    Raises:
        CheckpointError: from the context, if the adapter of ``path`` does not fit ``base``.
    """
    return translated(
        lambda reason: CheckpointError(
            f"{key}={path}: the adapter does not fit its base {base} ({reason}); set "
            "base_model_name_or_path in adapter_config.json to the base of the training run"
        )
    )


def check_files(folder: Path, *, key: str) -> None:
    """Check the config and the headers of a model folder, before anything is built from it.

    Raises:
        CheckpointError: if the weights are quantised or in another folder, or the config has more
            layers than the files have tensors.
        Exception: of a library, if a file cannot be read; see ``loading``.
    """
    if not folder.is_dir():  # a hub id
        return
    config = _json_object(folder / "config.json")
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise CheckpointError(
            f"{key}={folder}: config.json has quantization_config ({method}): quantised weights "
            "cannot be trained; give the unquantised model"
        )
    dtypes = dict(_stored_dtypes(folder))
    odd = [name for name, dtype in dtypes.items() if _is_weight(name) and dtype not in FLOATS]
    if odd:
        raise CheckpointError(
            f"{key}={folder}: {_named(odd)} stored as {dtypes[odd[0]]}; weights must be floating-"
            f"point numbers ({', '.join(sorted(FLOATS))}). Give the unquantised model"
        )
    for name in LAYER_COUNTS:
        layers = config.get(name)
        if isinstance(layers, int) and layers > len(dtypes) > 0:
            raise CheckpointError(
                f"{key}={folder}: config.json has {name}={layers}, more than the files have "
                f"tensors ({len(dtypes)}): they are of another model"
            )


def _is_weight(name: str) -> bool:
    return name.endswith((".weight", ".weight_packed"))


def _stored_dtypes(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the stored dtype of each tensor in the safetensors files of a folder."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        places = _json_object(index).get("weight_map")
        names = set(places.values()) if isinstance(places, dict) else set()
        if not names or any(Path(str(name)).name != name for name in names):
            raise CheckpointError(
                f"{index}: weight_map must map each tensor to a file of the same folder"
            )
    for name in sorted(names):
        if (folder / name).is_file():
            with safe_open(folder / name, "pt") as tensors:
                for tensor in tensors.keys():  # noqa: SIM118 - no dict
                    yield tensor, tensors.get_slice(tensor).get_dtype()


def _json_object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must be a JSON object, but is a {type(content).__name__}")
    return content


def check_weights(
    model: PreTrainedModel, report: Mapping[str, Any], *, key: str, place: str
) -> None:
    """Check that loading has filled every parameter of ``model``, with finite numbers.

    ``report`` is the loading info of transformers. A sequence classifier that is made from a
    language model has a new head, and the file's own head is left out.

    Raises:
        CheckpointError: naming the tensors that are missing, unexpected, of another shape, NaN or
            infinite.
    """
    missing, unexpected = (sorted(report[f"{name}_keys"]) for name in ("missing", "unexpected"))
    is_scorer = type(model).__name__.endswith("ForSequenceClassification")
    if is_scorer and not _is_trained_scorer(model):
        missing, unexpected = ([n for n in x if _in_body(model, n)] for x in (missing, unexpected))
    shapes = [
        f"{name} {list(stored)} instead of {list(wanted)}"
        for name, stored, wanted in sorted(report["mismatched_keys"])
    ]
    found = [
        f"{_named(names)} {what}"
        for names, what in (
            (missing, "missing"),
            (unexpected, "not part of the model"),
            (shapes, "of another shape"),
        )
        if names
    ]
    if found:
        raise CheckpointError(
            f"{key}={place}: the weights do not fit config.json: {'; '.join(found)}. Give the "
            "whole folder of one model, with the config.json that was saved with the weights"
        )
    check_finite(model, key=key, place=place)


def check_finite(model: PreTrainedModel, *, key: str, place: str) -> None:
    """Check that no weight of ``model`` is NaN or infinite.

    Raises:
        CheckpointError: naming the parameters that have such weights.
    """
    with torch.no_grad():  # a NaN or an infinity stays one in a sum, which needs no copy
        broken = [
            name
            for name, weight in model.named_parameters()
            if not weight.is_meta and not weight.sum(dtype=torch.float32).isfinite()
        ]
    if broken:
        raise CheckpointError(
            f"{key}={place}: {_named(broken)} NaN or infinite: the file is damaged, or its "
            "training diverged. Give an intact model"
        )


def _is_trained_scorer(model: PreTrainedModel) -> bool:
    return "SequenceClassification" in str(model.config.architectures)


def _in_body(model: PreTrainedModel, name: str) -> bool:
    """Return True if a tensor is part of the model without its head."""
    parts = {model.base_model_prefix, *(part for part, _ in model.base_model.named_children())}
    return name.partition(".")[0] in parts


def _named(names: list[str]) -> str:
    """Return the first of ``names``, the number of the others, and a verb."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more} {'is' if len(names) == 1 else 'are'}"
