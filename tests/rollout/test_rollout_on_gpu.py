"""Rollouts on a GPU generate what they generate on a CPU, by every decoder, in every precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from rlhf.config.choices import Dtype, When
from rlhf.config.roles import Role
from rlhf.data.collate import collate_prompts
from rlhf.engine.settings import EngineSettings
from rlhf.engine.torch_engine import TorchEngine
from rlhf.models.families import decoder_parts
from rlhf.models.language_model import LanguageModel
from rlhf.models.lora import LoraSpec, adapter_of, add_adapters
from rlhf.rollout.decoders.cuda_graphs import NO_ROOM, GraphedDecoder
from rlhf.rollout.decoders.fused import FusedDecoder
from rlhf.rollout.decoders.via_cache import CacheDecoder
from rlhf.rollout.fast import FastRollout, FastSettings
from rlhf.rollout.padding import unpadded
from rlhf.rollout.sampling import SamplingSettings
from rlhf.rollout.scheduler import Request, Scheduler
from rlhf.rollout.stopping import StopTexts
from rlhf.types import PromptBatch, Ranks
from tests.pretend_cuda.gpu import Event, Gpu
from tests.rollout.decoder_checks import FAMILIES, VOCABULARY, some_prompts, tiny_model
from tests.rollout.test_fused_decoder import FAST
from tests.zero_settings import zero_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlhf.rollout.decoders.decoder import Decoder

TOKENS, ROWS, LIMIT = 16, 3, 6
LENGTHS = (5, 1, 9, 3)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SAMPLING = SamplingSettings(max_tokens=LIMIT, temperature=1.0, top_k=0, top_p=1.0)


def fused(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> FusedDecoder:
    parts = decoder_parts(model, tokens=TOKENS)
    assert parts is not None
    return FusedDecoder(parts, adapter_of, rows=ROWS, tokens=TOKENS, dtype=dtype)


def graphed(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> GraphedDecoder:
    return GraphedDecoder(fused(model, dtype), rows=ROWS, tokens=TOKENS)


def cached(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> CacheDecoder:
    return CacheDecoder(model, rows=ROWS, tokens=TOKENS, device=model.device, dtype=dtype)


def some_draws() -> torch.Tensor:
    return torch.rand(len(LENGTHS), LIMIT, generator=torch.Generator().manual_seed(3))


def generated(decoder: Decoder, device: torch.device) -> list[list[int]]:
    """More responses than rows, of different lengths: rows leave, move and join."""
    requests = [Request(i, tuple(p), LIMIT - i) for i, p in enumerate(some_prompts(LENGTHS))]
    scheduler = Scheduler(
        decoder, SAMPLING, end_id=-1, stop=StopTexts(None, ()), max_rows=ROWS, anyone_works=bool
    )
    with torch.no_grad():
        scheduler.run(requests, some_draws().to(device))
    return [request.ids for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_fp32_responses_are_those_of_the_cpu(gpu: Gpu, name: str) -> None:
    makers = [fused, graphed, cached] if name in FAST else [cached]
    model = tiny_model(name)
    expected = generated(makers[0](model), CPU)
    model.to(GPU)
    for make in makers:
        assert generated(make(model), GPU) == expected, make.__name__


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_adapters_are_not_merged_into_copies(gpu: Gpu, name: str) -> None:
    model = tiny_model(name)
    spec = LoraSpec(rank=2, alpha=4.0, dropout=0.0, target_modules=None, train_rest=False)
    add_adapters(model, spec, seed=1)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(2))
    expected = generated(fused(model), CPU)
    model.to(GPU)
    before = gpu.used
    decoder = fused(model)
    kept = gpu.used - before - decoder._memory.nbytes
    tables = sum(table.nbytes for table in decoder._rotations or ())
    # Tensors take whole blocks of 512 bytes; the weights of a layer are 4 KiB and more.
    assert kept <= tables + 2048
    assert generated(decoder, GPU) == expected
    assert generated(graphed(model), GPU) == expected


def test_graphs_share_one_pool(gpu: Gpu) -> None:
    model = tiny_model("opt").to(GPU)
    generated(graphed(model), GPU)
    assert len(gpu.pools) > 1
    assert len(set(gpu.pools)) == 1
    assert None not in gpu.pools
    generated(graphed(model), GPU)
    assert len(set(gpu.pools)) == 2


def test_a_decode_step_waits_for_its_tokens_only(gpu: Gpu) -> None:
    model = tiny_model("opt").to(GPU)
    decoder = graphed(model)
    generated(decoder, GPU)  # captures its graphs
    with gpu.counting() as counts:
        generated(decoder, GPU)
    events = counts.events
    assert events[Event.capture] == 0
    assert events[Event.replay] > 0
    assert events[Event.to_device] == 1, "the draws of this test"
    assert events[Event.sync] == 0
    # Tokens and log-probs: two copies for each step, whether it decodes or begins new rows.
    steps = events[Event.to_host] / 2
    assert events[Event.replay] <= steps <= events[Event.replay] + len(LENGTHS)


def test_without_memory_for_graphs_steps_are_launched(
    gpu: Gpu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("opt")
    expected = generated(fused(model), CPU)
    model.to(GPU)

    @contextmanager
    def full(*_: object, **__: object) -> Iterator[None]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        yield

    capture, captures = torch.cuda.graph, []

    def first_only(graph: torch.cuda.CUDAGraph, **how: object) -> AbstractContextManager[None]:
        captures.append(graph)
        return capture(graph, **how) if len(captures) == 1 else full()

    monkeypatch.setattr(torch.cuda, "graph", first_only)
    assert generated(graphed(model), GPU) == expected
    assert len(captures) == 2  # it is tried once
    assert caplog.messages == [NO_ROOM]


def test_other_errors_of_a_capture_are_raised(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = graphed(tiny_model("opt").to(GPU))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generated(decoder, GPU)


def prompts() -> PromptBatch:
    ids = some_prompts(LENGTHS)
    return collate_prompts(ids, [""] * len(ids), some_draws(), pad_id=0, device=GPU)


@pytest.mark.slow
@pytest.mark.parametrize("has_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize(("stage", "dtype"), [(0, Dtype.bf16), (1, Dtype.bf16), (0, Dtype.fp32)])
@pytest.mark.parametrize("name", FAST)
def test_a_model_that_is_trained_answers(
    gpu: Gpu, name: str, stage: int, dtype: Dtype, has_graphs: bool
) -> None:
    ranks = Ranks(0, 1, GPU)
    settings = EngineSettings(zero=zero_config(stage=stage), dtype=dtype)
    model = LanguageModel(tiny_model(name))
    engine = TorchEngine(model, role=Role.actor, settings=settings, ranks=ranks)
    rollout = FastRollout(
        SAMPLING,
        FastSettings(
            dtype=torch.float32 if dtype is Dtype.fp32 else torch.bfloat16,
            max_rows=ROWS,
            gather_weights=When.auto,
            cuda_graphs=has_graphs,
        ),
        end_id=VOCABULARY - 1,
        pad_id=0,
        stop=StopTexts(None, ()),
        parts_of=decoder_parts,
        adapter_of=adapter_of,
        ranks=ranks,
    )
    with gpu.counting() as counts:
        batch = prompts()
        unpadded(batch)
    assert counts.events[Event.sync] == 0
    assert counts.events[Event.to_host] == 2  # however many prompts there are
    responses = rollout.generate(engine, batch)
    assert responses.ids_BT.device == GPU
    lengths_B = responses.keep_BT.sum(dim=1)
    assert (responses.ended_B | (lengths_B == LIMIT)).all()
    assert responses.logprobs_BT[responses.keep_BT].lt(0).all()
