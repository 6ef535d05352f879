"""What an engine's model is saved as: an ordinary Hugging Face folder, or a peft adapter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from rlhf.config.choices import LoraExport
from rlhf.models.building import ModelSource
from rlhf.models.lora import has_adapters, merged_state, save_adapter
from rlhf.models.trunk import SharedTrunk, critic_model, critic_state
from rlhf.types import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Export(NamedTuple):
    """A model's class and config, and its whole weights."""

    model: Any
    state: dict[str, Tensor]
    base: ModelSource | None = None  # where there is one, only the adapters on it are saved

    def write(self, folder: Path) -> None:
        """Write config and weights into ``folder``."""
        if self.base is None:
            self.model.save_pretrained(folder, state_dict=dict(self.state))
            return
        place, revision = self.base.path, self.base.revision
        assert place is not None, "the checks refuse adapters on random weights"
        save_adapter(folder, self.model, self.state, base=place, revision=revision)


def exported(engine: Engine, *, as_: LoraExport, source: ModelSource) -> Export:
    """The engine's language model or scorer, started from ``source``; every rank must call it."""
    model: Any = engine.module.pretrained
    state = engine.whole_state(model)
    if not has_adapters(model):
        return Export(model, state)
    if as_ is LoraExport.adapter:
        return Export(model, state, source)
    return Export(model, merged_state(model, state))


def exported_critic(trunk: Engine, tokenizer: PreTrainedTokenizerBase) -> Export:
    """The critic of a shared trunk as a model of its own; every rank must call it."""
    assert isinstance(trunk.module, SharedTrunk)
    state = critic_state(trunk.module, trunk.whole_state(trunk.module))
    return Export(critic_model(trunk.module, tokenizer), state)
