"""Replace norms, rotary embeddings and SwiGLU of built models by Liger's kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.base.errors import CapabilityError
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.kernels.kernel_checks import use_if_equal
from rlhf.options.fused_layers.keys import FusedLayers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # families that tests compare with torch
BOUND = 0.05  # largest error of a layer's 16-bit gradients, as a share of the largest gradient


def select_fusing(
    config: RunConfig, role: Role
) -> list[Callable[[PreTrainedModel, tuple[str, ...]], None]]:
    """Return the function that replaces the layers of a built model of ``role``, or no function."""
    if config.fused_layers is FusedLayers.liger:
        return [fuse_layers]
    is_replaced = role is Role.actor and config.rollout.backend == "hybrid_engine"
    return [] if is_replaced or find_spec("liger_kernel") is None else [fuse_fitting_layers]


def find_misfit(fields: Mapping[str, Any]) -> str | None:
    """Return the field of a model's config, with its value, that Liger does not fit, or None."""
    family, activation = fields.get("model_type"), fields.get("hidden_act", "silu")
    if family not in FAMILIES:
        return f"model_type={family}"
    return None if activation == "silu" else f"hidden_act={activation}"


def require_fitting_layers(fields: Mapping[str, Any]) -> None:
    """Raise CapabilityError if Liger does not fit a model whose config has these ``fields``."""
    if (misfit := find_misfit(fields)) is not None:
        raise CapabilityError(
            f"fused_layers=liger: a model with {misfit} is not supported, only model_type="
            f"{', '.join(FAMILIES)} with hidden_act=silu; use fused_layers=none"
        )


def fuse_layers(model: PreTrainedModel, _head: tuple[str, ...]) -> None:
    """Replace the layers of ``model``; raise CapabilityError if Liger does not fit it."""
    require_fitting_layers(model.config.to_dict())
    replace_layers(model)


def fuse_fitting_layers(model: PreTrainedModel, _head: tuple[str, ...]) -> None:
    """Replace the layers of ``model`` if Liger fits it, and computes a layer as torch does.

    Layers that torch.compile replaces stay as they are.
    """
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    if is_compiled or find_misfit(model.config.to_dict()) is not None:
        return
    shape = (model.config.model_type, model.config.hidden_size)

    def compare(_: object) -> list[tuple[Tensor, Tensor]]:
        device = torch.device("cuda", torch.cuda.current_device())
        has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
        return compare_layer(model, device, torch.bfloat16 if has_bf16 else torch.float16)

    if use_if_equal("fused layers", "cuda", lambda: True, compare, shape=shape, bound=BOUND):
        replace_layers(model)


def compare_layer(
    like: PreTrainedModel, device: torch.device, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Return output and gradients of a layer with Liger's kernels, each beside torch's.

    The layer has the sizes of a layer of ``like``, except for the MLP's.
    """
    small: dict[str, Any] = {"num_hidden_layers": 1, "intermediate_size": 256, "layer_types": None}
    small |= {"vocab_size": 64, "pad_token_id": 0, "initializer_range": 0.02}
    model = type(like)(type(like.config)(**like.config.to_dict() | small)).to(device, dtype)
    expected = _run_layer(model)
    modeling = import_module(type(model).__module__)
    before = dict(vars(modeling))
    try:
        replace_layers(model)
        return list(zip(_run_layer(model), expected, strict=True))
    finally:
        vars(modeling).update(before)


@torch.enable_grad()
def _run_layer(model: PreTrainedModel) -> list[Tensor]:
    model.zero_grad()
    ids = torch.arange(40, device=model.device).view(2, 20)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    weights = torch.linspace(-0.01, 0.01, hidden.numel(), device=model.device).view_as(hidden)
    (hidden * weights).sum().backward()
    return [hidden.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


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
