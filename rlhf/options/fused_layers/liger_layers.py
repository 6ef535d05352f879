"""Replace norms, rotary embeddings and SwiGLU of built models by Liger's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlhf.base.errors import CapabilityError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # families that tests compare with torch


def require_fitting_layers(fields: Mapping[str, Any]) -> None:
    """Raise CapabilityError if Liger does not fit a model whose config has these ``fields``."""
    family, activation = fields.get("model_type"), fields.get("hidden_act", "silu")
    if family not in FAMILIES or activation != "silu":
        obstacle = f"hidden_act={activation}" if family in FAMILIES else f"model_type={family}"
        raise CapabilityError(
            f"fused_layers=liger: a model with {obstacle} is not supported, only model_type="
            f"{', '.join(FAMILIES)} with hidden_act=silu; use fused_layers=none"
        )


def fuse_layers(model: PreTrainedModel, _head: tuple[str, ...]) -> None:
    """Replace the layers of ``model``; raise CapabilityError if Liger does not fit it."""
    require_fitting_layers(model.config.to_dict())
    replace_layers(model)


def replace_layers(model: PreTrainedModel) -> None:
    """Replace the layers of ``model``, and the rotary embedding of all models of its family."""
    from liger_kernel import transformers as liger
    from liger_kernel.ops import LigerRopeFunction

    family = model.config.model_type
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    classes = {name: each for name, each in vars(modeling).items() if isinstance(each, type)}
    replace = getattr(liger, f"apply_liger_kernel_to_{family}")
    replace(model=model, rope=False, fused_linear_cross_entropy=False)
    # Restore the classes that Liger replaces: its MLP would lose the biases of models built later.
    # Liger's own way to replace the rotary embedding looks for other kernels in each call.
    vars(modeling).update(classes, apply_rotary_pos_emb=LigerRopeFunction.apply)
