"""The kernels of a CPU, in C; None where torch computes instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf.base.decoder_modules import DecoderModules
from rlhf.config.choices import Dtype
from rlhf.options.cpu_kernels.adamw import AdamwKernel, adamw_kernel
from rlhf.options.cpu_kernels.compiled import CompiledDecoder, can_compile
from rlhf.options.cpu_kernels.compiling import describe_kernels
from rlhf.options.cpu_kernels.logprobs import LogprobKernel, cpu_logprob_kernel
from rlhf.rollout.decoders.layers import AdapterOf


def describe(dtype: Dtype) -> str | None:
    """Return the line of ``describe_kernels``; None for fp16, which has no kernels."""
    if dtype not in {Dtype.bf16, Dtype.fp32}:
        return None
    return describe_kernels(half=dtype is Dtype.bf16)


def adamw_update(_sizes: Sequence[int], _device: torch.device) -> AdamwKernel | None:
    """Return AdamW's update."""
    return adamw_kernel()


def average_kernel(_sizes: Sequence[int], _device: torch.device) -> None:
    """Return None: torch averages split weights."""


def logprobs_kernel(logits: Tensor) -> LogprobKernel | None:
    """Return log-probs of logits of this dtype, and their gradient."""
    return cpu_logprob_kernel(logits)


draw_kernel = logprobs_kernel  # the same kernel samples too


def build_decoder(
    parts: DecoderModules, adapter_of: AdapterOf, *, rows: int, tokens: int, dtype: torch.dtype
) -> CompiledDecoder | None:
    """Return a decoder whose forward pass is one call."""
    if not can_compile(parts, dtype):
        return None
    return CompiledDecoder(parts, adapter_of, rows=rows, tokens=tokens, dtype=dtype)


def attention_kernel(_device: torch.device, _dtype: torch.dtype, *, group: int, size: int) -> None:
    """Return None: torch attends over a KV cache."""
