"""Write model folders that appear complete or not at all.

Weights may arrive one at a time; then only one file's are in memory, unless experts are split.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf.base.atomic import replace_atomically, retry_transient_errors
from rlhf.base.heartbeat import beat
from rlhf.base.stored_files import find_entries

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHARD_BYTES = 5 * 10**9  # largest file of weights: rank 0 keeps it in memory while it saves

NamedTensor = tuple[str, Tensor]
Stream = Iterable[NamedTensor]


@contextmanager
def replace_folder_atomically(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which replaces ``folder`` if the block succeeds."""
    with replace_atomically(folder) as building:
        building.mkdir(parents=True)
        yield building
        copy_folder_permissions(building)


def copy_folder_permissions(folder: Path) -> None:
    """Give weight files the permissions of ``folder``, since safetensors makes them private."""
    for file in find_entries(folder, "**/*.safetensors"):
        file.chmod(folder.stat().st_mode & 0o666)


def save_model(
    folder: Path,
    write: Callable[[Path], None],
    tokenizer: PreTrainedTokenizerBase,
    *,
    description: str,
    task: str,
    base_model: str | None = None,
) -> None:
    """Write a Hugging Face folder: files from ``write(folder)``, tokenizer and model card.

    The hub lists the model under ``task``, and links it to ``base_model``, a hub id.
    """
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCardData(
        library_name="transformers", pipeline_tag=task, tags=["rlhf"], base_model=base_model
    )
    header = data.to_yaml()
    title = f"{folder.parent.name}/{folder.name}"
    card = ModelCard(f"---\n{header}\n---\n\n# {title}\n\n{description}\n")
    with replace_folder_atomically(folder) as building:
        write(building)
        tokenizer.save_pretrained(building)
        card.save(building / "README.md")


def tensors_to_save(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters (tied weights once) and persistent buffers by name; some may be sharded."""
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return {**dict(module.named_parameters()), **buffers}


def save_from_stream(
    folder: Path, model: PreTrainedModel, stream: Stream, *, shard_bytes: int
) -> None:
    """Write config and weights of ``model`` as transformers does, with weights from ``stream``."""
    from transformers.dynamic_module_utils import custom_object_save

    # model.save_pretrained imports DeepSpeed in about two seconds; one CPU rank does not need it.
    config = model.config
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    write_shards(folder, rename_to_saved_names(model, stream), shard_bytes)


def rename_to_saved_names(model: PreTrainedModel, stream: Stream) -> Iterator[NamedTensor]:
    """Yield the tensors of ``stream`` with the names that transformers gives them in files.

    If tensors of the file are parts of one tensor of the model (experts), all are collected first.
    """
    from transformers.core_model_loading import WeightConverter, revert_weight_conversion

    left_out = set(model._keys_to_ignore_on_save or ())
    kept = ((name, tensor) for name, tensor in stream if name not in left_out)
    groups: Iterable[dict[str, Tensor]] = ({name: tensor} for name, tensor in kept)
    conversions = getattr(model, "_weight_conversions", None) or []
    if any(isinstance(conversion, WeightConverter) for conversion in conversions):
        groups = [{name: tensor.to("cpu", copy=True) for name, tensor in kept}]
    for group in groups:
        yield from revert_weight_conversion(model, group).items()


def hold_tensors(
    stream: Stream, *, most_bytes: int, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Yield dicts of copies on ``device`` of the tensors: at most ``most_bytes``, or one tensor.

    Each dict is emptied when the next one is requested.
    """
    held: dict[str, Tensor] = {}
    for name, tensor in stream:
        beat()
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > most_bytes:
            yield held
            held.clear()
        held[name] = tensor.to(device, copy=True).contiguous()
    yield held


def write_shards(
    folder: Path, stream: Stream, shard_bytes: int, after_file: Callable[[], None] = beat
) -> None:
    """Write files of at most ``shard_bytes`` (or one larger tensor); of several, also an index."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    sizes = {"total_size": 0, "total_parameters": 0}
    for held in hold_tensors(stream, most_bytes=shard_bytes, device=torch.device("cpu")):
        part = folder / f"{len(shards)}.part"
        retry_transient_errors(partial(save_file, held, part, metadata={"format": "pt"}))
        shards.append(list(held))
        sizes["total_size"] += sum(tensor.nbytes for tensor in held.values())
        sizes["total_parameters"] += sum(tensor.numel() for tensor in held.values())
        after_file()
    if len(shards) == 1:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for number, file in enumerate(files):
        (folder / f"{number}.part").rename(folder / file)
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    index = {"metadata": sizes, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text)
