"""Read which tokens end a response of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def end_ids_of(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens that end a response; ``build_actor`` stores them in the model."""
    ids = model.generation_config.eos_token_id
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)
