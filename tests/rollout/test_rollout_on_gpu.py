"""Rollouts on a GPU generate what they generate on a CPU, by every decoder, in every precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from rlhf.base.ranks import Ranks
from rlhf.base.stored_responses import join_rows
from rlhf.base.types import PromptBatch, SequenceBatch, pad_rows
from rlhf.config.choices import Dtype
from rlhf.config.roles import Role
from rlhf.data.collate import collate_prompts
from rlhf.engine.settings import EngineSettings
from rlhf.engine.torch_engine import TorchEngine
from rlhf.kernels import kernels_for
from rlhf.kernels.gpu import attention_gpu
from rlhf.models.families import find_decoder_modules
from rlhf.models.language_model import LanguageModel, kept_token_logprobs
from rlhf.options.ahead.overlapped_sampling import SnapshotPolicy
from rlhf.options.environments.parked_rows import Continuation, ParkedRows
from rlhf.options.lora.models import adapter_of, add_adapters
from rlhf.rollout import scheduler as scheduler_module
from rlhf.rollout.decoders import attention, cuda_graphs
from rlhf.rollout.decoders.cuda_graphs import Extent, GraphedDecoder
from rlhf.rollout.decoders.decoder import DrawingDecoder, Newest, Texts
from rlhf.rollout.decoders.fused import FusedDecoder
from rlhf.rollout.decoders.via_cache import CacheDecoder
from rlhf.rollout.fast import FastRollout, KeptDecoder, unpad_prompts
from rlhf.rollout.sampling import SamplingSettings, StopTexts
from rlhf.rollout.scheduler import Request, Scheduler
from tests.lora_settings import lora_config
from tests.pretend_cuda.gpu import Event, Gpu
from tests.rollout.decoder_checks import (
    FAMILIES,
    AttentionByTorch,
    fast_rollout,
    some_prompts,
    tiny_model,
)
from tests.rollout.test_fused_decoder import FAST
from tests.runs import soaked
from tests.zero_settings import zero_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlhf.rollout.decoders.decoder import Decoder

TOKENS, ROWS, LIMIT = 16, 3, 6
LENGTHS = (5, 1, 9, 3)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SAMPLING = SamplingSettings(max_tokens=LIMIT, temperature=1.0, top_k=0, top_p=1.0)


def fused(model: PreTrainedModel, *, tokens: int = TOKENS) -> FusedDecoder:
    parts = find_decoder_modules(model, tokens=TOKENS)
    assert parts is not None
    return FusedDecoder(parts, adapter_of, rows=ROWS, tokens=tokens, dtype=torch.float32)


def graphed(
    model: PreTrainedModel,
    sampling: SamplingSettings = SAMPLING,
    end_id: int = -1,
    *,
    extent: Extent | None = None,
) -> GraphedDecoder:
    parts = find_decoder_modules(model, tokens=TOKENS)
    assert parts is not None
    extent = extent or Extent.from_rollout(ROWS, TOKENS, some_draws())
    how: dict[str, Any] = {"extent": extent, "dtype": torch.float32, "weights": []}
    return GraphedDecoder(parts, adapter_of, sampling, end_ids=[end_id], **how)


def cached(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> CacheDecoder:
    return CacheDecoder(model, rows=ROWS, tokens=TOKENS, device=model.device, dtype=dtype)


def some_draws() -> torch.Tensor:
    return torch.rand(len(LENGTHS), LIMIT, generator=torch.Generator().manual_seed(3))


def generated(
    decoder: Decoder | DrawingDecoder,
    device: torch.device,
    sampling: SamplingSettings = SAMPLING,
    end_id: int = -1,
) -> list[list[int]]:
    """More responses than rows, of different lengths: rows leave, move and join."""
    requests = [Request(i, tuple(p), LIMIT - i) for i, p in enumerate(some_prompts(LENGTHS))]
    scheduler = Scheduler(
        decoder,
        sampling,
        end_ids=[end_id],
        stop=StopTexts(None, ()),
        max_rows=ROWS,
        any_rank_works=bool,
    )
    with torch.no_grad():
        scheduler.run(requests, some_draws().to(device))
    return [request.ids for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("name", soaked(FAMILIES, "phi", "falcon", "gptj", "starcoder2", "gemma"))
def test_fp32_responses_are_those_of_the_cpu(gpu: Gpu, name: str) -> None:
    makers = [fused, graphed, cached] if name in FAST else [cached]
    model = tiny_model(name)
    expected = generated(makers[0](model), CPU)
    model.to(GPU)
    for make in makers:
        assert generated(make(model), GPU) == expected, make.__name__


def engine_of(
    model: PreTrainedModel,
    *,
    stage: int = 0,
    dtype: Dtype = Dtype.fp32,
    fp32_logits: bool = False,
) -> TorchEngine:
    settings = EngineSettings(zero=zero_config(stage=stage), dtype=dtype)
    module, ranks = LanguageModel(model, fp32_logits=fp32_logits), Ranks(0, 1, GPU)
    return TorchEngine(module, role=Role.actor, settings=settings, ranks=ranks)


@pytest.mark.parametrize("name", ["opt", "llama", "qwen3"])
def test_joint_projections_change_no_response(gpu: Gpu, name: str) -> None:
    model = tiny_model(name)
    expected = generated(fused(model), CPU)
    engine_of(model)
    for make in (fused, graphed):
        decoder = make(model)
        layers = decoder._layers if isinstance(decoder, FusedDecoder) else decoder._decoder._layers
        assert [len(layer.query_key_value) for layer in layers] == [1] * len(layers)
        assert generated(decoder, GPU) == expected


@pytest.mark.parametrize(("name", "separate", "saved"), [("opt", 25, 2), ("llama", 41, 3)])
@pytest.mark.parametrize(("stage", "dtype"), [(0, Dtype.fp32), (0, Dtype.bf16), (1, Dtype.bf16)])
def test_layers_side_by_side_are_one_product(
    gpu: Gpu, name: str, separate: int, saved: int, dtype: Dtype, stage: int
) -> None:
    """At stage 0 the weights are fp32; a rollout in bf16 copies them to joint ones."""
    precision = torch.bfloat16 if dtype is Dtype.bf16 else torch.float32

    def launches(num_layers: int, *, is_joint: bool) -> int:
        model = tiny_model(name, num_hidden_layers=num_layers)
        engine_of(model, stage=stage, dtype=dtype)
        parts = find_decoder_modules(model, tokens=TOKENS)
        for block in () if is_joint else parts.blocks:
            for layer in filter(None, (*block.query_key_value, block.gate, block.up)):
                layer.weight.data = layer.weight.data.to(precision, copy=True)
        decoder = FusedDecoder(parts, adapter_of, rows=ROWS, tokens=TOKENS, dtype=precision)
        ids = torch.ones(ROWS, dtype=torch.long, device=GPU)
        with torch.no_grad(), gpu.counting() as counts:
            decoder.decode(ids, [4, 2, 3])
        return counts.events[Event.launch]

    apart, joint = (
        launches(3, is_joint=is_joint) - launches(2, is_joint=is_joint)
        for is_joint in (False, True)
    )
    assert apart - joint == saved
    assert dtype is Dtype.bf16 or apart == separate  # in half precision the CPU's norms take more


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_adapters_are_not_merged_into_copies(gpu: Gpu, name: str) -> None:
    model = tiny_model(name)
    spec = lora_config()
    add_adapters(model, spec, seed=1)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(2))
    expected = generated(fused(model), CPU)
    model.to(GPU)
    before = gpu.used
    decoder = fused(model)
    kept = gpu.used - before - decoder.attention.kv_cache.nbytes
    tables = sum(table.nbytes for table in decoder._rotary or ())
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


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0.7}, {"top_k": 1}, {"top_k": 5, "top_p": 0.8}, {"min_p": 0.2}],
    ids=str,
)
def test_graphs_draw_as_the_scheduler_does(gpu: Gpu, fields: dict[str, Any]) -> None:
    sampling = replace(SAMPLING, **fields, min_tokens=3)
    model = tiny_model("opt")
    (end_id, *_), *_ = generated(fused(model), CPU, sampling)  # a likely token
    expected = generated(fused(model), CPU, sampling, end_id)
    model.to(GPU)
    assert generated(graphed(model, sampling, end_id), GPU, sampling, end_id) == expected


@pytest.mark.parametrize("sorted_first", [1, 4, 256])
def test_rows_with_large_nuclei_are_drawn_after_the_graph(
    gpu: Gpu, sorted_first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph sorts a fixed number of tokens; a row that needs more costs one further wait."""
    sampling = replace(SAMPLING, top_p=0.7, min_tokens=3)
    model = tiny_model("opt")
    (end_id, *_), *_ = generated(fused(model), CPU, sampling)
    expected = generated(fused(model), CPU, sampling, end_id)
    model.to(GPU)
    decoder = graphed(model, sampling, end_id)
    monkeypatch.setattr("rlhf.rollout.sampling.NUCLEUS", sorted_first)
    assert generated(decoder, GPU, sampling, end_id) == expected
    with gpu.counting() as counts:
        assert generated(decoder, GPU, sampling, end_id) == expected
    assert (counts.events[Event.to_host] > len(LENGTHS)) == (sorted_first < 256)


def test_a_decode_step_is_one_graph_and_one_copy(gpu: Gpu) -> None:
    """If a row has joined, the newest tokens of all rows are sent, and a step is launched anew."""
    model = tiny_model("opt").to(GPU)
    decoder, draws = graphed(model), some_draws().to(GPU)
    rows = LENGTHS[:ROWS]
    ids = pad_sequence([torch.tensor(each) for each in some_prompts(rows)], batch_first=True)
    newest = [Newest(3, length, row, 1) for row, length in enumerate(rows)]
    counted = []
    with torch.no_grad():
        decoder.prefill(Texts(ids.to(GPU), list(rows)), first_row=0)
        for _ in range(3):
            with gpu.counting() as counts:
                tokens = decoder.decode_and_draw(newest, draws)[0].tolist()
            counted.append(counts.events)
            newest = [
                Newest(int(token), row.position + 1, row.request, row.step + 1)
                for token, row in zip(tokens, newest, strict=True)
            ]
        with gpu.counting() as counts:
            decoder.decode_and_draw(newest[::-1], draws)
    assert counted[0][Event.capture] == 1
    step = Counter({Event.replay: 1, Event.to_host_pinned: 1, Event.sync: 1})
    assert counted[1:] == [step] * 2
    twice = Counter({Event.replay: 2, Event.to_host_pinned: 2, Event.sync: 1})
    assert counts.events == twice | Counter({Event.to_device_pinned: 1})


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
    assert 0 < events[Event.sync] <= events[Event.replay] == events[Event.to_host_pinned]
    # Tokens and log-probs together: one copy for each step that begins new rows.
    assert 0 < events[Event.to_host] <= len(LENGTHS)


def test_the_next_step_is_launched_before_tokens_are_read(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step waits for the host only after rows have joined or left."""
    model, event, ahead = tiny_model("opt").to(GPU), torch.cuda.Event, []
    decoder = graphed(model)
    expected = generated(decoder, GPU)
    with gpu.counting() as counts:
        synchronize = event.synchronize

        def read_tokens(mark: torch.cuda.Event) -> None:
            ahead.append(counts.events[Event.replay] - len(ahead))
            synchronize(mark)

        monkeypatch.setattr(event, "synchronize", read_tokens)
        assert generated(decoder, GPU) == expected
    # This step, and the next one, except before the two prefills and where a graph is smaller.
    assert set(ahead) == {1, 2}
    assert ahead.count(1) <= 3


def test_a_rollout_reads_no_step_of_the_one_before(gpu: Gpu) -> None:
    """The step that was launched ahead at its end had the places that the second begins with."""
    model = tiny_model("opt").to(GPU)
    draws = [torch.rand(1, 6, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)]

    def sample(decoder: GraphedDecoder, draws_NT: torch.Tensor, prefix: int) -> list[int]:
        request = Request(0, (9, 4), LIMIT if prefix else 3, [8] * prefix, [0.0] * prefix)
        stop = StopTexts(None, ())
        how = {"end_ids": (), "stop": stop, "max_rows": ROWS, "any_rank_works": bool}
        with torch.no_grad():
            Scheduler(decoder, SAMPLING, **how).run([request], draws_NT)
        return request.ids

    def fresh() -> GraphedDecoder:
        return graphed(model, extent=Extent.from_rollout(ROWS, TOKENS, draws[0]))

    kept, device_draws = fresh(), [each.to(GPU) for each in draws]
    sample(kept, device_draws[0], 0)
    assert kept.is_ahead
    assert sample(kept, device_draws[1], 2) == sample(fresh(), device_draws[1], 2)


class Interrupter:
    """A ``Counterpart`` that adds tokens after each of a few turns, late and in any order."""

    def __init__(self, seed: int) -> None:
        self.random, self.due, self.turns = Random(seed), [], Counter()

    def submit_turn(self, request: Request) -> None:
        self.due.append(request)

    def continuations(self, *, wait: bool) -> list[Continuation]:
        self.random.shuffle(self.due)
        count = self.random.randint(int(wait), len(self.due)) if self.due else 0
        answered, self.due = self.due[:count], self.due[count:]
        return [self.answer(request) for request in answered]

    def answer(self, request: Request) -> Continuation:
        index = request.index
        turn = self.turns[index] = self.turns[index] + 1
        if turn > index % 3:
            return Continuation(index, None)
        added = list(range(7, 7 + 1 + index % 4))
        limit = len(request.ids) + len(added) + LIMIT
        return Continuation(index, added, limit=limit, first_draw=turn * LIMIT)


def use_small_pages(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Let rows take pages of a few columns, which torch reads as the kernel does."""
    kernel = AttentionByTorch(None)
    monkeypatch.setattr(kernels_for("cuda"), "attention_kernel", lambda *_, **__: kernel)
    for module in (attention, attention_gpu, cuda_graphs):
        monkeypatch.setattr(module, "CHUNK", columns)


@pytest.mark.parametrize("kind", ["whole rows", "pages", "few pages", "pauses"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_that_end_pause_and_join_draw_as_without_graphs(
    gpu: Gpu, seed: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few pages some rows give theirs up, and are prefilled again with what they drew."""
    model, rows, pauses = tiny_model("llama").to(GPU), 4, "pauses" in kind
    tokens = 60 if pauses else 9 + LIMIT
    lengths = [Random(seed).choice((1, 4, 9)) for _ in range(14)]
    draws_NT = torch.rand(14, 3 * LIMIT, generator=torch.Generator().manual_seed(seed)).to(GPU)
    if "pages" in kind:
        use_small_pages(monkeypatch, 4)
    mean = {"few pages": 4, "pages": tokens}.get(kind)
    parts = find_decoder_modules(model, tokens=tokens)
    extent = Extent.from_rollout(rows, tokens, draws_NT, parked=rows * pauses, mean_tokens=mean)
    found, logprobs, removed = [], [], []
    preempt = Scheduler._preempt

    def record(scheduler: Scheduler) -> list[Request]:
        requests = preempt(scheduler)
        removed.extend(len(request.ids) for request in requests)
        return requests

    monkeypatch.setattr(Scheduler, "_preempt", record)
    monkeypatch.setattr(scheduler_module, "SPARE_TOKENS", 1)
    for has_graphs in (False, True):
        decoder = FusedDecoder(parts, adapter_of, rows=2 * rows, tokens=tokens, dtype=torch.float32)
        if has_graphs:
            decoder = graphed(model, end_id=5, extent=extent)
        requests = [Request(i, tuple(p), LIMIT) for i, p in enumerate(some_prompts(tuple(lengths)))]
        scheduler = Scheduler(
            decoder,
            SAMPLING,
            end_ids=range(5, 15),
            stop=StopTexts(None, ()),
            max_rows=rows,
            any_rank_works=bool,
            pause=partial(ParkedRows, Interrupter(seed)) if pauses else None,
        )
        with torch.no_grad():
            scheduler.run(requests, draws_NT)
        found.append([(r.ids, r.turn_starts) for r in requests])
        logprobs.append(torch.tensor([x for r in requests for x in r.logprobs]))
    assert found[0] == found[1]
    assert len({len(ids) for ids, _ in found[0]}) > 2
    torch.testing.assert_close(*logprobs, atol=1e-5, rtol=0)
    assert bool(removed) == (kind == "few pages")


@pytest.mark.parametrize("by_lengths", [False, True])
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_with_attention_by_lengths_one_graph_serves_all(
    gpu: Gpu, name: str, by_lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name, max_position_embeddings=256)
    expected = generated(fused(model), CPU)
    if by_lengths:
        monkeypatch.setattr(
            kernels_for("cuda"), "attention_kernel", lambda *_, **__: AttentionByTorch(None)
        )
    model.to(GPU)
    assert generated(fused(model), GPU) == expected
    assert generated(graphed(model), GPU) == expected
    draws = some_draws().to(GPU)
    extent = Extent.from_rollout(ROWS, 200, draws)
    decoder = graphed(model, extent=extent)
    with torch.no_grad(), gpu.counting() as counts:
        for position in (100, 127, 128, 150):
            decoder.decode_and_draw([Newest(3, position, 0, 1)], draws)
    assert counts.events[Event.capture] == (1 if by_lengths else 2)


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
    (line,) = (line for line in caplog.messages if "graphs" in line)
    assert line.startswith("kernels: torch replaces CUDA graphs (CUDA out of memory. Tried to ")


GRAPHS = {"dtype": torch.bfloat16, "max_rows": ROWS, "cuda_graphs": True}


def rollout_of(ranks: Ranks, **changes: Any) -> FastRollout:
    return fast_rollout(SAMPLING, ranks=ranks, **{"kept": KeptDecoder()} | GRAPHS | changes)


def test_graphs_are_kept_while_the_weights_stay_in_place(gpu: Gpu) -> None:
    """The weights are rounded to bf16 for the rollout, anew in each."""
    ranks = Ranks(0, 1, GPU)
    engine = engine_of(tiny_model("opt"))
    keeping, batch = rollout_of(ranks), prompts()

    def captures() -> int:
        fresh = rollout_of(ranks, kept=None).generate(engine, batch)
        with gpu.counting() as counts:
            responses = keeping.generate(engine, batch)
        assert torch.equal(responses.ids_BT, fresh.ids_BT)
        assert torch.equal(responses.logprobs_BT, fresh.logprobs_BT)
        return counts.events[Event.capture]

    assert captures() > 0
    for parameter in engine.module.parameters():
        parameter.data.mul_(1.5)
    assert captures() == 0
    for parameter in engine.module.parameters():
        parameter.data = parameter.data * 0.5
    assert captures() > 0


def test_evaluations_share_graphs_and_cache_with_training(gpu: Gpu) -> None:
    """More prompts than rows, and greedy answers, which need graphs of their own."""
    ranks, kept, batch = Ranks(0, 1, GPU), KeptDecoder(), prompts()
    engine = engine_of(tiny_model("opt"))
    held_out = join_rows([batch, batch], pad_id=0)
    training = rollout_of(ranks, kept=kept)
    greedy = replace(training, sampling=replace(SAMPLING, top_k=1))
    captures = []
    with torch.no_grad():
        for backend, asked in 2 * [(training, held_out), (greedy, held_out), (training, batch)]:
            with gpu.counting() as counts:
                backend.generate(engine, asked)
            captures.append(counts.events[Event.capture])
    assert captures[3:] == [0] * 3, captures
    assert captures[0] >= captures[2], "training captures the shapes that it alone needs"
    fresh = replace(greedy, kept=None).generate(engine, held_out)
    assert torch.equal(fresh.ids_BT, greedy.generate(engine, held_out).ids_BT)


def test_graphs_and_joint_projections_outlast_snapshots(gpu: Gpu, tmp_path: Path) -> None:
    """Sampling beside training loads the weights of each step from files."""
    model, ranks = LanguageModel(tiny_model("llama")), Ranks(0, 1, GPU)
    engine_settings = EngineSettings(zero=zero_config(stage=1), dtype=Dtype.bf16)
    policy = SnapshotPolicy(model, role=Role.actor, settings=engine_settings, ranks=ranks)
    rollout, captures, responses = rollout_of(ranks), [], set()
    for step in range(3):
        weights = {n: p.cpu() * (1 + 0.5 * step) for n, p in model.named_parameters()}
        (tmp_path / str(step)).mkdir()
        save_file(weights, tmp_path / str(step) / "model.safetensors")
        with gpu.counting() as counts:
            policy.load(tmp_path / str(step))
            responses.add(str(rollout.generate(policy, prompts()).logprobs_BT.tolist()))
        captures.append(counts.events[Event.capture])
    assert (captures[0] > 0, captures[1:]) == (True, [0, 0])
    assert len(responses) == 3  # each step samples from its own weights
    layers = fused(model.pretrained)._layers
    assert [len(layer.query_key_value) for layer in layers] == [1] * len(layers)


def prompts() -> PromptBatch:
    ids = some_prompts(LENGTHS)
    return collate_prompts(ids, [""] * len(ids), some_draws(), pad_id=0, device=GPU)


@pytest.mark.parametrize(
    ("name", "stage", "dtype", "has_graphs"),
    [
        ("opt", 1, Dtype.bf16, True),
        ("llama", 0, Dtype.bf16, True),
        ("qwen3", 0, Dtype.bf16, False),
        ("gpt_neox", 0, Dtype.fp32, False),
    ],
)
def test_a_model_that_is_trained_answers(
    gpu: Gpu, name: str, stage: int, dtype: Dtype, has_graphs: bool
) -> None:
    engine = engine_of(tiny_model(name), stage=stage, dtype=dtype)
    precision = torch.float32 if dtype is Dtype.fp32 else torch.bfloat16
    how = {"dtype": precision, "cuda_graphs": has_graphs}
    rollout = rollout_of(Ranks(0, 1, GPU), **how)
    with gpu.counting() as counts:
        batch = prompts()
        unpad_prompts(batch)
    assert counts.events[Event.sync] == 0
    assert counts.events[Event.to_host] == 2  # however many prompts there are
    responses = rollout.generate(engine, batch)
    assert responses.ids_BT.device == GPU
    lengths_B = responses.keep_BT.sum(dim=1)
    assert (responses.ended_B | (lengths_B == LIMIT)).all()
    assert responses.logprobs_BT[responses.keep_BT].lt(0).all()


# By the model's own forward pass only the logits could differ; the fused layers round elsewhere.
@pytest.mark.parametrize(("is_fused", "bound"), [(True, 0.1), (False, 1e-5)])
def test_rollout_and_training_keep_fp32_logits(gpu: Gpu, is_fused: bool, bound: float) -> None:
    finder = find_decoder_modules if is_fused else lambda *_, **__: None
    sampled, trained = {}, {}
    for fp32_logits in (False, True):
        model = tiny_model("llama")
        engine = engine_of(model, dtype=Dtype.bf16, fp32_logits=fp32_logits)
        batch = prompts()
        rollout = rollout_of(Ranks(0, 1, GPU), dtype=torch.bfloat16)
        responses = replace(rollout, find_modules=finder).generate(engine, batch)
        texts = zip(unpad_prompts(batch), responses.ids_BT.tolist(), strict=True)
        ids_BS, attend_BS = pad_rows([prompt + answer for prompt, answer in texts], pad_id=0)
        keep_BS = attend_BS.clone()
        for row, length in enumerate(LENGTHS):
            keep_BS[row, :length] = False
        asked = SequenceBatch(*(each.to(GPU) for each in (ids_BS, attend_BS, keep_BS)))
        with torch.no_grad():
            trained[fp32_logits] = kept_token_logprobs(engine, asked)
        sampled[fp32_logits] = responses.logprobs_BT[responses.keep_BT]
    for found in (sampled, trained):
        assert 1e-4 < (found[True] - found[False]).abs().max() < 0.1
    assert (sampled[True] - trained[True]).abs().max() < bound
