"""Count the launches and bytes of a transformer layer, with and without Liger's kernels.

``python -m tests.options.fused_layers.launches`` prints them for a layer of Llama-8B. Tensors are
on the meta device, which has shapes and no values. Each operation of torch that is no view is one
launch, which reads its inputs once and writes its outputs once. Triton kernels are not run; each of
their launches is counted in the same way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LAYERS = (1, 2)  # the difference between two models is one layer
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
MAKE_NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "lift_fresh"}


@dataclass
class Work(TorchDispatchMode):
    """The launches and bytes within the context."""

    launches: int = 0
    bytes: int = 0
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def add(self, name: str, *tensors: Any) -> None:
        """Count one launch that reads or writes ``tensors``."""
        self.launches += 1
        self.names.append(name)
        found = (each for each in tree_leaves(tensors) if isinstance(each, Tensor))
        self.bytes += sum(each.numel() * each.element_size() for each in found)

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not function.is_view and name not in MAKE_NO_LAUNCH and "view" not in name:
            self.add(name, args, kwargs, out)
        return out


class Passes(NamedTuple):
    """What one layer adds to a forward and to a backward pass."""

    forward: Work
    backward: Work


def count_launches(*, fuses: bool, batch: tuple[int, int] = (4, 512)) -> Passes:
    """Count one layer of Llama-8B in bf16, for a ``batch`` of sequences and tokens."""
    shallow, deep = (_run(layers, batch, fuses=fuses) for layers in LAYERS)
    parts = []
    for few, many in zip(shallow, deep, strict=True):
        names = list(many.names)
        for name in few.names:
            names.remove(name)
        parts.append(Work(many.launches - few.launches, many.bytes - few.bytes, names))
    return Passes(*parts)


def _run(layers: int, batch: tuple[int, int], *, fuses: bool) -> Passes:
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    AttentionInterface.register("counted", flash_attention)
    config = LlamaConfig(**LLAMA_8B, num_hidden_layers=layers, attn_implementation="counted")
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    forward, backward = Work(), Work()
    ids = torch.zeros(batch, dtype=torch.long, device="meta")
    try:
        if fuses:
            from rlhf.options.fused_layers.liger_layers import replace_layers

            replace_layers(model)
        with counted_kernels(), forward:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        gradient = torch.empty_like(hidden)
        with counted_kernels(), backward:
            hidden.backward(gradient)
    finally:
        vars(modeling_llama).update(before)
    return Passes(forward, backward)


def flash_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention by the kernel that SDPA selects on a GPU; elsewhere it selects others."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    return attend(query, key, value, 0.0, True)[0].transpose(1, 2).contiguous(), None


@contextmanager
def counted_kernels() -> Iterator[None]:
    """Count launches of Triton kernels in the ``Work`` of the context, and launch none."""
    from triton.runtime.jit import JITFunction

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        mode: Any = torch.utils._python_dispatch._get_current_dispatch_mode()
        mode.add(self.fn.__name__, args)

    run, JITFunction.run = JITFunction.run, launch
    try:
        yield
    finally:
        JITFunction.run = run


if __name__ == "__main__":
    for fuses in (False, True):
        for name, work in count_launches(fuses=fuses)._asdict().items():
            words = f"{work.launches} launches, {work.bytes / 2**20:,.0f} MiB"
            print(f"{'liger' if fuses else 'torch'}, {name}: {words}: {' '.join(work.names)}")
