"""Compare the rollouts of every fused decoder with the model's own forward pass.

Shapes: S = tokens of one sequence, T = tokens of one response, V = vocabulary,
N = responses (of ``draws_NT``), otherwise the tokens of all responses.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.config.choices import Device, Dtype
from rlhf.engine.devices import TORCH_DTYPES, resolve_dtype
from rlhf.engine.torch_engine import allocate_weights
from rlhf.gpu_check.kernels import DTYPE_NAMES, SHAPES
from rlhf.gpu_check.rows import CheckRow, Size, Task, checked_row
from rlhf.models.build import build_actor
from rlhf.models.families import find_decoder_modules
from rlhf.models.sources import ModelSource
from rlhf.models.tokenizers import train_tokenizer
from rlhf.rollout.decoders.cuda_graphs import Extent, GraphedDecoder
from rlhf.rollout.decoders.fused import TOLERANCES, FusedDecoder
from rlhf.rollout.sampling import SamplingSettings, StopTexts
from rlhf.rollout.scheduler import Request, Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS, ROWS, LIMIT = 24, 3, 12  # tokens per row, rows decoded at once, longest response
PROMPT_LENGTHS = (5, 1, 9, 3)  # more prompts than ROWS, so that freed rows are used again
SAMPLING = SamplingSettings(max_tokens=LIMIT, temperature=1.0, top_k=0, top_p=1.0)
VOCABULARY = 300  # tokens of the tokenizer: all bytes, and some more
MODELS: dict[str, dict[str, Any]] = SHAPES["decoders"]


def check_decoders(_folder: Path, _size: Size) -> Iterator[Task]:
    """Yield two tasks per model and precision: decoding step by step, and with CUDA graphs."""
    dtypes = (torch.float32, TORCH_DTYPES[resolve_dtype(Dtype.auto, Device.cuda)])
    for name, dtype, has_graphs in product(MODELS, dtypes, (False, True)):
        check = partial(_check_decoder, name, dtype, has_graphs=has_graphs)
        yield f"{name}, {DTYPE_NAMES[dtype]}{', graphs' if has_graphs else ''}", check


@torch.no_grad()
def _check_decoder(name: str, dtype: torch.dtype, *, has_graphs: bool) -> CheckRow:
    model, tolerance = _build_tiny_model(name).to("cuda"), TOLERANCES[dtype]
    # Store the parameters side by side in ``dtype``, as an engine does; buffers stay in fp32.
    storages = allocate_weights(list(model.parameters()), dtype, torch.device("cuda", 0))
    for parameter, storage in storages.items():
        parameter.data = storage.copy_(parameter.data)
    draws_NT = torch.rand(len(PROMPT_LENGTHS), LIMIT, generator=torch.Generator().manual_seed(3))
    responses = _generate_responses(model, dtype, draws_NT, has_graphs)
    distances = [_measure_distances(model, r, draws_NT[r.index]) for r in responses]
    error_N, outside_N, std_N = torch.cat(distances, dim=1)
    # Log-probs that differ by d move the CDF by up to exp(d) - 1, about d.
    is_right = (error_N <= tolerance) & (outside_N <= tolerance * std_N.min())  # False for NaN
    equal, tokens, worst = int((outside_N == 0).sum()), len(error_N), float(error_N.max())
    figure = f"{equal} of {tokens} tokens, {worst:.1g} std"
    expected = f"tokens, log-probs within {tolerance} std"
    return checked_row(
        bool(is_right.all()), figure, expected, tokens=tokens, equal=equal, logprob=worst
    )


def _build_tiny_model(name: str) -> PreTrainedModel:
    """Build a model in fp32 on the CPU; all weights, including biases and norms, are random."""
    architecture = MODELS[name] | {"model_type": name.partition("-")[0]}
    source = ModelSource(key=name, path=None, architecture=architecture)
    model = build_actor(source, train_tokenizer(["a model"], vocab_size=VOCABULARY), seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def _generate_responses(
    model: PreTrainedModel, dtype: torch.dtype, draws_NT: Tensor, has_graphs: bool
) -> list[Request]:
    parts = find_decoder_modules(model, tokens=TOKENS)
    assert parts is not None, "MODELS has only models with a fused decoder"
    decoder: FusedDecoder | GraphedDecoder
    if has_graphs:
        decoder = GraphedDecoder(
            parts,
            lambda _: None,
            SAMPLING,
            end_ids=(),
            extent=Extent.from_rollout(ROWS, TOKENS, draws_NT),
            dtype=dtype,
            weights=[],
        )
    else:
        decoder = FusedDecoder(parts, lambda _: None, rows=ROWS, tokens=TOKENS, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    requests = []
    for index, length in enumerate(PROMPT_LENGTHS):
        prompt = torch.randint(3, VOCABULARY // 2, (length,), generator=generator)
        requests.append(Request(index, tuple(prompt.tolist()), LIMIT - index))
    stop = StopTexts(None, ())
    Scheduler(decoder, SAMPLING, end_ids=(), stop=stop, max_rows=ROWS, any_rank_works=bool).run(
        requests, draws_NT.to(model.device)
    )
    return requests


def _measure_distances(model: PreTrainedModel, request: Request, draws_T: Tensor) -> Tensor:
    """Compare a decoded response with the model's own forward pass over it.

    Return (3, T): the differences of the log-probs, in standard deviations over the vocabulary; how
    far each random number is outside its token's interval in the model's own CDF; and the standard
    deviations.
    """
    ids_S = torch.tensor([*request.prompt, *request.ids], device=model.device)
    logits_SV = model(ids_S[None]).logits[0]
    logprobs_TV = logits_SV[len(request.prompt) - 1 : -1].double().log_softmax(dim=-1).cpu()
    ids_T1, std_T = torch.tensor(request.ids)[:, None], logprobs_TV.std(dim=-1)
    own_T = logprobs_TV.gather(1, ids_T1).squeeze(1)
    end_T = logprobs_TV.exp().cumsum(dim=-1).gather(1, ids_T1).squeeze(1)
    draws_T = draws_T[: len(own_T)].double()
    outside_T = torch.maximum(end_T - own_T.exp() - draws_T, draws_T - end_T).clamp(min=0)
    return torch.stack([(own_T - torch.tensor(request.logprobs)).abs() / std_T, outside_T, std_T])
