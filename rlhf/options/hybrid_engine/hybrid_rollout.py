"""Rollouts with DeepSpeed's Hybrid Engine: its inference layers run on the trained weights.

The layers of DeepSpeed 0.19.8 are written for transformers 4: they return tuples, and have their
own KV cache. ``adapt_deepspeed_layers`` adapts them to transformers 5. Before the first rollout
their outputs are compared with the outputs of the model's own layers.

Shapes: B = sequences, P = prompt tokens, T = response tokens, S = tokens of one call, N = rows that
are compared, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from inspect import signature
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlhf.base.decoder_modules import kv_cache_parameter_name
from rlhf.base.errors import CapabilityError
from rlhf.base.stored_responses import join_rows
from rlhf.base.types import Engine, PromptBatch, Responses, take_rows
from rlhf.options.hybrid_engine.supported_models import Greedy, describe_parity_failure
from rlhf.rollout.hf import HfRollout, replace_generation_config, split_prompts

COMPARED_ROWS, COMPARED_TOKENS = 4, 16
BACKEND = "rollout.backend=hybrid_engine"


@dataclass(frozen=True, kw_only=True)
class HybridSettings:
    """Settings of ``HybridEngineRollout``.

    At most ``max_rows`` responses are generated at once: the engine's KV cache has that many rows.
    With ``cuda_graphs`` all batches are padded to ``max_rows`` prompts of ``max_prompt_tokens``,
    since a CUDA graph replays one shape only.
    """

    dtype: torch.dtype
    max_rows: int
    max_prompt_tokens: int
    cuda_graphs: bool


@dataclass
class HybridEngineRollout(HfRollout):
    """A ``RolloutBackend`` that samples with ``generate`` of DeepSpeed's Hybrid Engine.

    Raises:
        CapabilityError: in ``generate``, if DeepSpeed's layers fail or disagree with the model.
    """

    settings: HybridSettings
    _is_checked: bool = field(default=False, init=False)

    def generate(self, actor: Engine, prompts: PromptBatch) -> Responses:
        """Return one response per prompt, which depends only on the prompt and its random draws."""
        if not self._is_checked:
            self._check_parity(actor, prompts)
            self._is_checked = True
        parts = [
            self._sample(actor, part) for part in split_prompts(prompts, self.settings.max_rows)
        ]
        return join_rows(parts, pad_id=self.pad_id)

    def _sample(self, actor: Engine, prompts: PromptBatch) -> Responses:
        num_rows, options = len(prompts.texts), self._length_options(self.sampling.max_tokens)
        if self.settings.cuda_graphs:
            prompts = _pad_to_max(prompts, self.settings, pad_id=self.pad_id)
        with actor.evaluating() as module, _use_deepspeed_layers(module) as (policy, generate):
            responses = self.sample(
                policy,
                prompts,
                generate,
                ends_early=not self.settings.cuda_graphs,
                synced_gpus=actor.is_sharded,
                **options,
            )
        return take_rows(responses, list(range(num_rows)))

    def _length_options(self, tokens: int) -> dict[str, int]:
        """Return {}, or with CUDA graphs the options that fix the number of generated tokens."""
        is_fixed = self.settings.cuda_graphs
        return {"max_new_tokens": tokens, "min_new_tokens": tokens} if is_fixed else {}

    def _check_parity(self, actor: Engine, prompts: PromptBatch) -> None:
        """Raise CapabilityError if the engine's layers disagree with the model's own layers."""
        # Generate ``max_rows`` rows, although only the first COMPARED_ROWS rows are compared.
        # The first call of the engine fixes the number of rows in its KV cache.
        num_rows = len(prompts.texts)
        prompts = take_rows(prompts, [row % num_rows for row in range(self.settings.max_rows)])
        if self.settings.cuda_graphs:
            prompts = _pad_to_max(prompts, self.settings, pad_id=self.pad_id)
        tokens = min(COMPARED_TOKENS, self.sampling.max_tokens)
        with actor.evaluating() as module:
            failure = describe_parity_failure(
                lambda: self._decode_greedily(actor, module, prompts, tokens=tokens),
                lambda ids_NT: _compute_plain_logprobs(module, prompts, ids_NT),
                dtype=self.settings.dtype,
            )
        if failure is not None:
            raise CapabilityError(f"{BACKEND}: {failure}; use rollout=fast")

    def _decode_greedily(
        self, actor: Engine, module: nn.Module, prompts: PromptBatch, *, tokens: int
    ) -> Greedy:
        """Decode the first rows greedily with the engine's layers; return tokens and log-probs."""
        from transformers import GenerationConfig, LogitsProcessorList

        rows, logprobs = slice(0, COMPARED_ROWS), []

        def record_logprobs(_: Tensor, logits_BV: Tensor) -> Tensor:
            logprobs.append(logits_BV[rows].float().log_softmax(dim=-1).max(dim=-1).values)
            return logits_BV

        settings = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=self.pad_id
        )
        with (
            _use_deepspeed_layers(module) as (policy, generate),
            replace_generation_config(settings, policy),
        ):
            ids_BS = generate(
                input_ids=prompts.ids_BP,
                attention_mask=prompts.attend_BP.long(),
                generation_config=settings,
                logits_processor=LogitsProcessorList([record_logprobs]),
                synced_gpus=actor.is_sharded,
                **self._length_options(tokens),
            )
        return Greedy(ids_BS[rows, prompts.ids_BP.shape[1] :], torch.stack(logprobs, dim=1))


def adapt_deepspeed_layers(module: nn.Module) -> int:
    """Adapt the layers that DeepSpeed built to transformers 5; return their number, at least 1."""
    containers = getattr(_find_hybrid_engine(module), "_inference_containers", ())
    if not containers:
        raise CapabilityError(
            f"{BACKEND}: DeepSpeed has replaced no layer of {type(module).__name__}, and would "
            "generate as rollout=hf does; use rollout=fast"
        )
    for number, container in enumerate(containers):
        layer = container.module
        layer.forward = _return_only_hidden_state(layer.forward, counts_tokens=number == 0)
        # At stage 3 DeepSpeed 0.19.8 adds a bias that Llama lacks, from uninitialised memory.
        layer.attention._qkv_buffers[1].zero_()
        products = layer.mlp.mlp_gemm_func
        products.mlp_gemm_func = _keep_residual(products.mlp_gemm_func)
    return len(containers)


def _keep_residual(products: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``products`` so that it gets a copy of the residual, its second argument.

    The kernel of DeepSpeed 0.19.8 adds attention's output to the residual in place
    (``ds_rms_mlp_gemm``), and ``ResidualAddOp`` adds it once more.
    """

    def multiply(attention_BSH: Tensor, residual_BSH: Tensor, *args: Any) -> Any:
        return products(attention_BSH, residual_BSH.clone(), *args)

    return multiply


def _return_only_hidden_state(
    forward: Callable[..., Any], *, counts_tokens: bool
) -> Callable[..., Tensor]:
    """Wrap a layer's ``forward`` to return only its hidden state.

    If ``counts_tokens``, the wrapper also adds one placeholder per token to transformers' KV cache,
    which DeepSpeed's layers leave empty: transformers 5 makes masks as wide as this cache.
    """

    def forward_hidden_state(hidden_BSH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Tensor = forward(hidden_BSH, *args, **kwargs)[0]
        if counts_tokens:
            numbers = hidden_BSH.new_empty(1, 1, hidden_BSH.shape[1], 1)
            kwargs[str(kv_cache_parameter_name(kwargs))].update(numbers, numbers, 0)
        return hidden

    return forward_hidden_state


def _find_hybrid_engine(module: nn.Module) -> Any:
    """Return the Hybrid Engine that has replaced ``module.generate`` with its own, or None."""
    return getattr(module.generate, "__self__", None)


@contextmanager
def _use_deepspeed_layers(module: nn.Module) -> Iterator[tuple[Any, Callable[..., Tensor]]]:
    """Replace the model's layers by DeepSpeed's in the context; yield model and ``generate``."""
    engine = _find_hybrid_engine(module)
    policy: Any = getattr(module, "pretrained", module)
    attention = policy.config._attn_implementation
    if not engine.Z3_enabled:
        for container in engine._inference_containers:
            container.reset_params()  # needed if the moving average replaced the weights
    with redirect_stdout(StringIO()):  # eval() prints timings
        engine.eval()
    policy.set_attn_implementation("eager")  # DeepSpeed's layers need eager's additive masks
    try:
        yield policy, engine.generate
    finally:
        policy.set_attn_implementation(attention)
        engine.train()  # train() restores the model's own layers
        module.eval()


def _compute_plain_logprobs(module: nn.Module, prompts: PromptBatch, ids_NT: Tensor) -> Tensor:
    """Return log-probabilities (N, T, V) by the model's own layers at the tokens ``ids_NT``."""
    policy: Any = getattr(module, "pretrained", module)
    num_rows, tokens = ids_NT.shape
    ids_NS = torch.cat([prompts.ids_BP[:num_rows], ids_NT], dim=1)
    attend_NS = pad(prompts.attend_BP[:num_rows].long(), (0, tokens), value=1)
    logits_NSV = policy(
        input_ids=ids_NS,
        attention_mask=attend_NS,
        position_ids=(attend_NS.cumsum(dim=1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=tokens + 1,
    ).logits
    logprobs: Tensor = logits_NSV[:, :-1].float().log_softmax(dim=-1)
    return logprobs


def _pad_to_max(prompts: PromptBatch, settings: HybridSettings, *, pad_id: int) -> PromptBatch:
    """Pad to ``max_rows`` prompts of ``max_prompt_tokens``; the prompts repeat to fill the rows."""
    num_rows = len(prompts.texts)
    prompts = take_rows(prompts, [row % num_rows for row in range(settings.max_rows)])
    padding = settings.max_prompt_tokens - prompts.ids_BP.shape[1]
    return prompts._replace(
        ids_BP=pad(prompts.ids_BP, (padding, 0), value=pad_id),
        attend_BP=pad(prompts.attend_BP, (padding, 0), value=False),
    )


def hybrid_engine_unavailable_reason(*, tensor_parallel: int) -> str | None:
    """Return why the Hybrid Engine cannot run on this machine with these versions, or None."""
    from importlib.metadata import version

    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    if tensor_parallel > 1:
        return (
            f"rollout.hybrid_engine.inference_tp_size={tensor_parallel}: deepspeed "
            f"{version('deepspeed')} gathers the prompts of tensor-parallel ranks, but not their "
            "padding masks; use rollout.hybrid_engine.inference_tp_size=1"
        )
    if not torch.cuda.is_available():
        return "torch finds no GPU here, and DeepSpeed's inference kernels require a GPU"
    if kv_cache_parameter_name(signature(LlamaDecoderLayer.forward).parameters) is None:
        return (
            f"transformers {version('transformers')} calls layers differently from transformers 5.x"
        )
    return None
