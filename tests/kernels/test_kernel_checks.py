"""Kernels are compared with torch; what differs or does not run is replaced, with one line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.base.cpu import MAX_ISA, Isa
from rlhf.config.choices import Kernels
from rlhf.engine.split_adamw import SplitAdamW
from rlhf.kernels import kernel_checks, kernels_for
from rlhf.kernels.cpu import cpu_kernels
from rlhf.kernels.cpu.adamw import AdamwKernel
from rlhf.kernels.cpu.cpu_layers import softmax_
from rlhf.kernels.cpu.logprobs import CpuSoftmax, LogprobKernel
from rlhf.kernels.gpu import gpu_kernels
from rlhf.kernels.kernel_checks import choose_kernels, replaced_kernels
from rlhf.kernels.torch_adamw import TorchAdamw
from rlhf.models.families import find_decoder_modules
from rlhf.options.lora.models import adapter_of
from rlhf.rollout.decoders.compiled import CompiledDecoder, build_compiled_decoder
from rlhf.rollout.decoders.layers import LayerBuilder
from tests.kernels.cpu.conftest import LEVELS
from tests.pretend_cuda import torch_cuda
from tests.pretend_cuda.gpu import Event, Gpu
from tests.rollout.decoder_checks import AttentionByTorch, tiny_model
from tests.rollout.test_rollout_on_gpu import engine_of, generated, graphed

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HALVES = [torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_checks, "_STATE", kernel_checks._State(Kernels.checked))


def load(name: str, dtype: torch.dtype) -> Any:
    """Ask for a kernel of the CPU as the core does, for numbers of ``dtype``."""
    kernels, rows = kernels_for("cpu"), torch.empty(5, 100, dtype=dtype)
    match name:
        case "AdamW":
            return kernels.adamw_kernel([300, 7], CPU, dtype)
        case "log-probs":
            return kernels.logprobs_kernel(rows)
        case "sampling":
            return kernels.draw_kernel(rows)
        case "softmax":
            return kernels.softmax_kernel(rows)
    model = tiny_model("qwen3")
    sizes = {"rows": 3, "tokens": 16}
    parts = find_decoder_modules(model, tokens=16)
    return build_compiled_decoder(parts, adapter_of, **sizes, dtype=dtype)


NAMES = ["AdamW", "log-probs", "sampling", "softmax", "decoder"]


@pytest.mark.parametrize("level", LEVELS[1:], ids=lambda level: level.name)
@pytest.mark.parametrize("dtype", HALVES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", NAMES)
def test_each_kernel_of_a_cpu_computes_what_torch_does(
    name: str, dtype: torch.dtype, level: Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MAX_ISA, level.name)
    before = torch.get_rng_state()
    assert load(name, dtype) is not None
    assert replaced_kernels() == []
    assert torch.equal(torch.get_rng_state(), before)


def add_to_first(function: Any, place: Any, amount: float) -> Any:
    """Return ``function`` that afterwards adds ``amount`` to one number of ``place``'s tensor."""

    def wrong(*args: Any, **how: Any) -> Any:
        found = function(*args, **how)
        place(found, *args, **how).view(-1)[0].add_(amount)
        return found

    return wrong


FAULTS = {
    "AdamW": (AdamwKernel, "step", lambda _, self, states, *__: states[0].first, 0.5),
    "log-probs": (LogprobKernel, "replace_by_gradient_", lambda _, self, x, *a, **k: x, 1.0),
    "sampling": (LogprobKernel, "draw", lambda found, *a, **k: found[0], 1),
    "softmax": (CpuSoftmax, "gradient_", lambda found, *a, **k: found, 0.3),
    "decoder": (CompiledDecoder, "decode", lambda found, *a, **k: found, 9.0),
}


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_number_is_found_and_torch_computes_from_then_on(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind, method, place, amount = FAULTS[name]
    monkeypatch.setattr(kind, method, add_to_first(getattr(kind, method), place, amount))
    choose_kernels(Kernels.auto)
    assert load(name, torch.float32) is not None, "the tests ran it on this CPU"
    choose_kernels(Kernels.checked)
    assert [load(name, dtype) for dtype in HALVES[::-1]] == [None, None]
    (line,) = replaced_kernels()
    assert caplog.messages == [line]
    assert line.startswith(f"kernels: torch replaces {name} (its error is ")
    assert line.endswith(kernel_checks.COSTS[name])
    assert "above the bound" in line


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_ours_computes_if_kernels_are_off(name: str) -> None:
    choose_kernels(Kernels.off)
    assert load(name, torch.float32) is None
    assert replaced_kernels() == []
    assert kernels_for("cpu").summarize_kernels("bf16") == "kernels: none, as hardware.kernels=off"


def test_a_kernel_that_gives_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuSoftmax, "softmax_", lambda _, scores: scores.fill_(torch.nan))
    given = torch.randn(4, 6)
    assert torch.equal(softmax_(given.clone()), given.softmax(1))
    assert "its error is nan" in replaced_kernels()[0]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("no C compiler\n  in line 3"), "no C compiler"), (OSError(), "OSError")],
)
def test_the_first_line_of_an_error_is_the_reason(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cpu_kernels, "load_adamw_kernel", fail)
    weights = torch.nn.Parameter(torch.ones(3))
    groups = [{"params": [weights], "lr": 0.1, "weight_decay": 0.0}]
    adamw = SplitAdamW(groups, betas=(0.9, 0.95), eps=1e-8, moments=torch.float32)
    assert isinstance(adamw._update, TorchAdamw)
    assert replaced_kernels()[0].startswith(f"kernels: torch replaces AdamW ({reason}): torch ")


def test_each_width_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    reduce_logits = LogprobKernel.reduce_logits

    def counted(self: LogprobKernel, logits_NV: Tensor, *rest: Any, **how: Any) -> None:
        compared.append(tuple(logits_NV.shape))
        reduce_logits(self, logits_NV, *rest, **how)

    monkeypatch.setattr(LogprobKernel, "reduce_logits", counted)
    for rows, width in ((3, 50), (9, 50), (100, 64), (3, 64)):
        assert kernels_for("cpu").logprobs_kernel(torch.empty(rows, width)) is not None
    assert compared == [(3, 50), (32, 64)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fault", [None, "launch", "place", "mask", "last row", "pages"])
def test_attention_is_compared_over_pages(
    gpu: Gpu, fault: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = AttentionByTorch(fault)
    monkeypatch.setattr(gpu_kernels, "attention_kernel", lambda *_: kernel)
    kv_cache = torch.zeros(2, 7, 2, 40, 16, dtype=dtype, device=GPU)  # one page is of no row
    found = kernels_for("cuda").attention_kernel(kv_cache, 3)
    assert found is (kernel if fault is None else None)
    assert len(replaced_kernels()) == (fault is not None)
    assert not kv_cache.any()


def responses_of(name: str) -> list[list[int]]:
    """Return the responses of a model with adjacent weights on the GPU, by CUDA graphs."""
    model = tiny_model(name)
    engine_of(model)
    return generated(graphed(model), GPU)


def break_joint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a joint projection begin one row too late."""
    join = LayerBuilder._join_and_cast

    def late(self: LayerBuilder, *weights: Tensor) -> Tensor:
        joined = join(self, *weights)
        return joined.roll(1, dims=0) if len(weights) > 1 else joined

    monkeypatch.setattr(LayerBuilder, "_join_and_cast", late)


def break_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a graph leave what its memory held."""
    monkeypatch.setattr(torch_cuda.Graph, "replay", lambda _: None)


def break_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a capture end in an error that is not for want of memory."""

    @contextmanager
    def refuse(*_: Any, **__: Any) -> Iterator[None]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        yield

    monkeypatch.setattr(torch.cuda, "graph", refuse)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("joint projections", break_joint),
        ("CUDA graphs", break_replay),
        ("CUDA graphs", break_capture),
    ],
)
def test_responses_are_those_of_torch_whatever_is_broken(
    gpu: Gpu,
    name: str,
    broken: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    choose_kernels(Kernels.off)
    with gpu.counting() as counts:
        expected = responses_of("llama")
    assert counts.events[Event.capture] == 0
    choose_kernels(Kernels.auto)
    assert responses_of("llama") == expected
    assert [line for line in caplog.messages if name in line] == []
    broken(monkeypatch)
    assert responses_of("llama") == expected
    (line,) = (line for line in caplog.messages if name in line)
    assert line.startswith(f"kernels: torch replaces {name} (")
