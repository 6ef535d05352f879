"""Responses from DeepSpeed's Hybrid Engine: its inference layers on the weights that are trained.

DeepSpeed 0.19.8 writes its layers for transformers 4: they return pairs, and keep keys and values
to themselves. ``adapt_layers`` makes them fit transformers 5. What they compute is compared with
the model's own layers before the first rollout.

Shapes: B = sequences, P = prompt tokens, T = response tokens, S = tokens of one call, N = rows that
are compared, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from inspect import signature
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlhf.errors import CapabilityError
from rlhf.rollout.hf import HfRollout, only
from rlhf.rollout.parity import Greedy, parity_obstacle
from rlhf.rollout.sampling import SamplingSettings
from rlhf.rollout.stopping import StopTexts
from rlhf.types import Engine, PromptBatch, Responses, take_rows

COMPARED_ROWS, COMPARED_TOKENS = 4, 16
REFUSAL = "rollout.backend=hybrid_engine"


@dataclass(frozen=True, kw_only=True)
class HybridSettings:
    """How the engine is run.

    ``max_rows`` responses are generated at once, at most: its memory is made for as many. With
    ``cuda_graphs`` all batches have ``max_rows`` prompts of ``max_prompt_tokens``, since a graph
    replays one shape.
    """

    dtype: torch.dtype
    max_rows: int
    max_prompt_tokens: int
    cuda_graphs: bool


class HybridEngineRollout:
    """Samples with the ``generate`` of DeepSpeed's Hybrid Engine; a ``RolloutBackend``.

    Raises:
        CapabilityError: its layers fail, or say otherwise than the model's own (``generate``).
    """

    def __init__(
        self,
        sampling: SamplingSettings,
        settings: HybridSettings,
        *,
        end_id: int,
        pad_id: int,
        stop: StopTexts,
    ) -> None:
        self._hf = HfRollout(sampling, end_id=end_id, pad_id=pad_id, stop=stop)
        self._max_tokens = sampling.max_tokens
        self._settings = settings
        self._pad_id = pad_id
        self._is_checked = False

    def generate(self, actor: Engine, prompts: PromptBatch) -> Responses:
        """One response per prompt, each decided by its own row of draws."""
        if not self._is_checked:
            self._check(actor, prompts)
            self._is_checked = True
        num_rows, at_once = len(prompts.texts), self._settings.max_rows
        parts = [
            self._sampled(
                actor, take_rows(prompts, list(range(first, min(first + at_once, num_rows))))
            )
            for first in range(0, num_rows, at_once)
        ]
        return _joined(parts, pad_id=self._pad_id)

    def _sampled(self, actor: Engine, prompts: PromptBatch) -> Responses:
        num_rows, options = len(prompts.texts), self._length(self._max_tokens)
        if self._settings.cuda_graphs:
            prompts = _of_one_shape(prompts, self._settings, pad_id=self._pad_id)
        with actor.evaluating() as module, _injected(module) as (policy, generate):
            responses = self._hf.sampled(
                policy,
                prompts,
                generate,
                ends_early=not self._settings.cuda_graphs,
                synced_gpus=actor.is_sharded,
                **options,
            )
        return take_rows(responses, list(range(num_rows)))

    def _length(self, tokens: int) -> dict[str, int]:
        """What tells DeepSpeed that a generation has ``tokens`` steps, for its graphs."""
        is_fixed = self._settings.cuda_graphs
        return {"max_new_tokens": tokens, "min_new_tokens": tokens} if is_fixed else {}

    def _check(self, actor: Engine, prompts: PromptBatch) -> None:
        """Refuse layers that say otherwise than the model's own."""
        # The engine makes its memory for the rows of its first call, and later ones may not have
        # more: so that has all rows, of which a few are compared.
        num_rows = len(prompts.texts)
        prompts = take_rows(prompts, [row % num_rows for row in range(self._settings.max_rows)])
        if self._settings.cuda_graphs:
            prompts = _of_one_shape(prompts, self._settings, pad_id=self._pad_id)
        tokens = min(COMPARED_TOKENS, self._max_tokens)
        with actor.evaluating() as module:
            found = parity_obstacle(
                lambda: self._greedy(actor, module, prompts, tokens=tokens),
                lambda ids_NT: _plain_logprobs(module, prompts, ids_NT),
                dtype=self._settings.dtype,
            )
        if found is not None:
            raise CapabilityError(f"{REFUSAL}: {found}; use rollout=fast")

    def _greedy(
        self, actor: Engine, module: nn.Module, prompts: PromptBatch, *, tokens: int
    ) -> Greedy:
        """The likeliest tokens of the first rows, as the engine's layers see it."""
        from transformers import GenerationConfig, LogitsProcessorList

        rows, told = slice(0, COMPARED_ROWS), []

        def listen(_: Tensor, logits_BV: Tensor) -> Tensor:
            told.append(logits_BV[rows].float().log_softmax(dim=-1).max(dim=-1).values)
            return logits_BV

        settings = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=self._pad_id
        )
        with _injected(module) as (policy, generate), only(settings, policy):
            ids_BS = generate(
                input_ids=prompts.ids_BP,
                attention_mask=prompts.attend_BP.long(),
                generation_config=settings,
                logits_processor=LogitsProcessorList([listen]),
                synced_gpus=actor.is_sharded,
                **self._length(tokens),
            )
        return Greedy(ids_BS[rows, prompts.ids_BP.shape[1] :], torch.stack(told, dim=1))


def open_to_engine(module: nn.Module) -> None:
    """Give a module that wraps a model (``pretrained``) what the Hybrid Engine looks for on it."""
    policy: Any = module.pretrained
    module.generate, module.config = policy.generate, policy.config


def adapt_layers(module: nn.Module) -> int:
    """Make the layers that DeepSpeed built for ``module`` fit transformers 5; returns their number.

    Raises:
        CapabilityError: it built none, and would generate as rollout=hf does.
    """
    containers = getattr(_engine_of(module), "_inference_containers", ())
    if not containers:
        raise CapabilityError(
            f"{REFUSAL}: DeepSpeed has replaced no layer of {type(module).__name__}, and would "
            "generate as rollout=hf does; use rollout=fast"
        )
    for number, container in enumerate(containers):
        layer = container.module
        layer.forward = _adapted(layer.forward, counts=number == 0)
        # At stage 3 DeepSpeed 0.19.8 adds a bias that Llama has not, from memory that it never set.
        layer.attention._qkv_buffers[1].zero_()
    return len(containers)


def _adapted(forward: Callable[..., Any], *, counts: bool) -> Callable[..., Tensor]:
    """A layer that returns its hidden state alone, and if it ``counts`` tells how many were taken.

    transformers 5 makes masks as wide as its own cache is long, which the layers leave empty: one
    number for each token stands there in place of keys and values.
    """

    def run(hidden_BSH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Tensor = forward(hidden_BSH, *args, **kwargs)[0]
        if counts:
            numbers = hidden_BSH.new_empty(1, 1, hidden_BSH.shape[1], 1)
            kwargs["past_key_values"].update(numbers, numbers, 0)
        return hidden

    return run


def _engine_of(module: nn.Module) -> Any:
    """The Hybrid Engine of a module: it puts its own ``generate`` in the place of the module's."""
    return getattr(module.generate, "__self__", None)


@contextmanager
def _injected(module: nn.Module) -> Iterator[tuple[Any, Callable[..., Tensor]]]:
    """The language model of ``module`` with DeepSpeed's layers in it, and what generates then."""
    engine = _engine_of(module)
    policy: Any = getattr(module, "pretrained", module)
    attention = policy.config._attn_implementation
    if not engine.Z3_enabled:
        for container in engine._inference_containers:
            container.reset_params()  # a moving average may have taken the weights' place
    with redirect_stdout(StringIO()):  # it prints its timings
        engine.eval()
    policy.set_attn_implementation("eager")  # its masks are numbers to add, as the layers want them
    try:
        yield policy, engine.generate
    finally:
        policy.set_attn_implementation(attention)
        engine.train()  # puts the model's own layers back
        module.eval()


def _plain_logprobs(module: nn.Module, prompts: PromptBatch, ids_NT: Tensor) -> Tensor:
    """Log-probabilities (N, T, V) of all tokens at each place of responses, by the model itself."""
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


def _of_one_shape(prompts: PromptBatch, settings: HybridSettings, *, pad_id: int) -> PromptBatch:
    """``max_rows`` prompts of ``max_prompt_tokens``; too few come again from the first on."""
    num_rows = len(prompts.texts)
    prompts = take_rows(prompts, [row % num_rows for row in range(settings.max_rows)])
    more = settings.max_prompt_tokens - prompts.ids_BP.shape[1]
    return prompts._replace(
        ids_BP=pad(prompts.ids_BP, (more, 0), value=pad_id),
        attend_BP=pad(prompts.attend_BP, (more, 0), value=False),
    )


def _joined(parts: list[Responses], *, pad_id: int) -> Responses:
    """All rows of ``parts``, as long as the longest."""
    longest = max(part.ids_BT.shape[1] for part in parts)

    def wide(values_BT: Tensor, value: float) -> Tensor:
        return pad(values_BT, (0, longest - values_BT.shape[1]), value=value)

    return Responses(
        torch.cat([wide(part.ids_BT, pad_id) for part in parts]),
        torch.cat([wide(part.keep_BT, False) for part in parts]),
        torch.cat([part.ended_B for part in parts]),
    )


def machine_obstacle(*, tensor_parallel: int) -> str | None:
    """Why the Hybrid Engine cannot run here, from device and versions alone; None: it can."""
    from importlib.metadata import version

    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import InferenceBuilder
    from deepspeed.ops.op_builder.builder import MissingCUDAException
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    if tensor_parallel > 1:
        return (
            f"rollout.hybrid_engine.inference_tp_size={tensor_parallel}: deepspeed "
            f"{version('deepspeed')} brings the prompts of such ranks together, and not the masks "
            "of their padding; use rollout.hybrid_engine.inference_tp_size=1"
        )
    if not torch.cuda.is_available():
        return "torch finds no GPU here, and DeepSpeed has its kernels for GPUs only"
    if "past_key_values" not in signature(LlamaDecoderLayer.forward).parameters:
        return f"transformers {version('transformers')} calls layers otherwise than 5.x"
    if installed_ops.get("transformer_inference"):
        return None
    try:
        is_compatible = InferenceBuilder().is_compatible(verbose=False)
    except (MissingCUDAException, OSError) as error:
        return f"DeepSpeed's inference kernels cannot be compiled here ({error})"
    return None if is_compatible else "DeepSpeed's inference kernels do not fit this GPU or CUDA"
