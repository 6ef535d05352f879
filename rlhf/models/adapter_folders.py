"""LoRA adapters in peft's format, which a model's folder may hold instead of whole weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf.base.errors import CheckpointError
from rlhf.base.foreign_errors import translate_errors
from rlhf.models.sources import ModelSource

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

ADAPTER = "default"  # peft's name for a model's only adapter
PREFIX = "base_model.model."  # prefix of the names in an adapter's file


def load_adapter_config(source: ModelSource) -> Any | None:
    """Return peft's config of the adapter in ``source``; None if ``source`` has none.

    Raises:
        CheckpointError: if the adapter is not a LoRA adapter, or does not name its base model.
        Exception: any error of peft or transformers if the adapter's files cannot be read.
    """
    from transformers.utils.peft_utils import find_adapter_config_file

    if find_adapter_config_file(source.path, revision=source.revision) is None:
        return None
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(source.path, revision=source.revision)
    base = config.base_model_name_or_path
    if config.peft_type != "LORA" or not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{source.key}={source.path}: adapter_config.json has peft_type={config.peft_type} and "
            f"base_model_name_or_path={base!r}; must be a LoRA adapter that names a base model. "
            "Use a folder with the adapter merged into the base model"
        )
    return config


def load_adapter_weights(source: ModelSource) -> dict[str, Tensor]:
    """Return the weights of the adapter in ``source`` by name, without peft's prefix.

    Raises:
        CheckpointError: if they cannot be read.
    """
    from safetensors.torch import load_file
    from transformers.utils import cached_file

    with translate_errors(source.build_error):
        file = cached_file(source.path, "adapter_model.safetensors", revision=source.revision)
        return {name.removeprefix(PREFIX): weight for name, weight in load_file(file).items()}


def merge_adapter(base: PreTrainedModel, source: ModelSource, config: Any) -> PreTrainedModel:
    """Merge the adapter in ``source``, and a head that was saved with it, into ``base``.

    Raises:
        CheckpointError: if the adapter cannot be read, or does not fit the model.
    """
    from peft import LoraModel, set_peft_model_state_dict

    def build_mismatch_error(reason: str) -> CheckpointError:
        return CheckpointError(
            f"{source.key}={source.path}: the adapter does not fit its base "
            f"{config.base_model_name_or_path} ({reason}); set base_model_name_or_path in "
            "adapter_config.json to the base of the training run"
        )

    weights = load_adapter_weights(source)
    largest = max((w.shape[0] for n, w in weights.items() if ".lora_A." in n and w.ndim), default=0)
    if not isinstance(config.r, int) or config.r > largest:
        raise build_mismatch_error(
            f"adapter_config.json has r={config.r!r}, its weights have rank {largest}"
        )
    with translate_errors(build_mismatch_error):
        frozen = {name for name, p in base.named_parameters() if not p.requires_grad}
        lora = LoraModel(base, config, ADAPTER)
        try:
            result = set_peft_model_state_dict(base, weights)
        except RuntimeError as error:  # shapes differ; the last line of the message names them
            raise build_mismatch_error(str(error).strip().splitlines()[-1].strip()) from error
        absent = [name for name in result.missing_keys if f".{ADAPTER}." in name]
        if absent or result.unexpected_keys:
            wrong = [*absent, *result.unexpected_keys][:3]
            raise build_mismatch_error(f"missing or unexpected: {', '.join(wrong)}")
        merged: PreTrainedModel = lora.merge_and_unload()
        for name, parameter in merged.named_parameters():  # peft has frozen all of them
            parameter.requires_grad_(name not in frozen)
        return merged
