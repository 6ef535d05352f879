"""Load a model to chat with onto the device on which this machine computes best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from rlhf.base.errors import CheckpointError
from rlhf.chat.talker import Talker
from rlhf.config.choices import Dtype
from rlhf.engine.devices import TORCH_DTYPES, best_device, resolve_dtype
from rlhf.models.build import build_actor
from rlhf.models.pretrained import load_config
from rlhf.models.sources import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

M = TypeVar("M", bound=nn.Module)
MODEL_FILES = ("config.json", "adapter_config.json")  # of a whole model, and of an adapter


def load_talker(
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    dtype: Dtype,
    *,
    stop: Sequence[str] = (),
    end_ids: Iterable[int] = (),
) -> Talker:
    """Return the language model of ``source``, ready to answer; ``dtype`` is fp32 or auto.

    Its answers end with the tokenizer's end token, one of ``end_ids``, or a text in ``stop``.
    """
    model = move_to_best_device(build_actor(source, tokenizer, seed=0), dtype)
    return Talker(model, tokenizer, stop=stop, end_ids=end_ids)


def move_to_best_device(model: M, dtype: Dtype) -> M:
    """Move ``model`` to the best device of this machine, with weights in ``dtype``.

    Buffers keep their precision, as in training: in bf16 the rotary angles would be wrong.
    """
    device = best_device()
    weights = TORCH_DTYPES[resolve_dtype(dtype, device)]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.device(device.value), weights)
    return model.to(torch.device(device.value)).eval()


def require_language_model(folder: Path, *, key: str) -> Path:
    """Return ``folder``, which holds a model or an adapter, after checking that it gives answers.

    Raises:
        CheckpointError: if the model gives scores; the message names ``key``.
    """
    names = []
    if (folder / MODEL_FILES[0]).is_file():
        names = load_config(ModelSource(key=key, path=str(folder))).architectures
    if "SequenceClassification" in str(names):
        raise CheckpointError(
            f"{key}={folder}: {names[0]} gives scores, not answers; choose a language model"
        )
    return folder


def holds_model(folder: Path) -> bool:
    """Return True if ``folder`` holds a model or an adapter in the format of Hugging Face."""
    return any((folder / name).is_file() for name in MODEL_FILES)
