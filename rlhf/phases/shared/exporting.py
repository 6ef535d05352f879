"""Export of an engine's model: an ordinary Hugging Face folder, or a peft adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from rlhf.checkpoint.model_folder import apply_umask
from rlhf.checkpoint.streaming import SHARD_BYTES, save_streamed, saved_tensors
from rlhf.config.choices import LoraExport
from rlhf.config.schema.rollout import RolloutConfig
from rlhf.models.lora import adapter_tensors, has_adapters, merged_stream, save_adapter
from rlhf.models.sources import ModelSource
from rlhf.models.trunk import SharedTrunk, critic_model, critic_state
from rlhf.types import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Export(NamedTuple):
    """A model to save: its class and config, and its tensors by name, which may be shards."""

    model: Any
    engine: Engine
    tensors: Mapping[str, Tensor]
    base: ModelSource | None = None  # if given, only the adapters on this base are saved

    def write(self, folder: Path | None, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Write config and weights into ``folder`` on rank 0; all other ranks must pass None.

        Rank 0 holds one file of weights at a time, of at most ``shard_bytes``; the others nothing.
        """
        stream = self.engine.stream_state(self.tensors)
        if folder is None:
            for _ in stream:
                pass
        elif self.base is None:
            merged = merged_stream(self.model, stream)
            save_streamed(folder, self.model, merged, shard_bytes=shard_bytes)
        else:
            place, revision = self.base.path, self.base.revision
            assert place is not None, "the checks refuse adapters on random weights"
            save_adapter(folder, self.model, stream, base=place, revision=revision)


def exported(engine: Engine, *, as_: LoraExport, source: ModelSource) -> Export:
    """Return the export of the engine's language model or scorer, which started from ``source``."""
    model: Any = engine.module.pretrained
    if has_adapters(model) and as_ is LoraExport.adapter:
        return Export(model, engine, adapter_tensors(model), source)
    return Export(model, engine, saved_tensors(model))


def write_weights(engine: Engine, folder: Path | None) -> None:
    """Write the engine's language model, with adapters merged, for a program that samples from it.

    Every rank calls it, all but rank 0 with None. Under ZeRO-3 one tensor is gathered at a time.
    """
    model: Any = engine.module.pretrained
    Export(model, engine, saved_tensors(model)).write(folder)
    if folder is not None:
        apply_umask(folder)  # the program may run as another user


def sample_as_trained(model: Any, rollout: RolloutConfig) -> None:
    """Set how ``generate`` samples from the saved ``model``, as rollouts do by default.

    Without do_sample, servers ignore the temperature of a request; other settings, such as a
    repetition penalty of the pretrained model, would sample from a policy that was not trained.
    """
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
    )


def exported_critic(trunk: Engine, tokenizer: PreTrainedTokenizerBase) -> Export:
    """Return the export of a shared trunk's critic as a separate model."""
    assert isinstance(trunk.module, SharedTrunk)
    tensors = critic_state(trunk.module, saved_tensors(trunk.module))
    return Export(critic_model(trunk.module, tokenizer), trunk, tensors)
