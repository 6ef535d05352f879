"""The pretended GPU finds what a GPU would refuse, and counts what it would do."""

import os

import pytest
import torch
from torch import nn
from torch.nn import functional

from rlhf.base.types import SequenceBatch, TokenPositions
from tests.pretend_cuda.gpu import GIB, Event, Gpu

CAPTURING = "operation not permitted when stream is capturing"


def test_it_computes_what_the_cpu_does(gpu: Gpu) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 3))
    x_BI = torch.randn(4, 5)
    model(x_BI).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.to("cuda")
    model(x_BI.to("cuda")).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad.device.type == "cuda"
        torch.testing.assert_close(parameter.grad.cpu(), gradient)  # other kernels of products


@pytest.mark.usefixtures("gpu")
def test_softmax_from_fp16_to_fp32_in_one_operation() -> None:
    """A CPU has no such operation; bloom's attention calls it."""
    half_BI = torch.randn(4, 5).half()
    plain_BI, there_BI = (x.requires_grad_() for x in (half_BI.float(), half_BI.to("cuda")))
    weights_I = torch.arange(5.0)
    for x_BI in (plain_BI, there_BI):
        shares_BI = functional.softmax(x_BI, dim=-1, dtype=torch.float32)
        assert shares_BI.dtype is torch.float32
        (shares_BI * weights_I.to(x_BI.device)).sum().backward()
    assert there_BI.grad.dtype is torch.float16
    torch.testing.assert_close(there_BI.grad.cpu(), plain_BI.grad.half())


def test_products_do_not_read_past_a_row(gpu: Gpu) -> None:
    """A CPU's product of bf16 does, if the row's length is odd, and there is NaN."""
    rows = torch.empty(37, 304, dtype=torch.bfloat16, device="cuda")[:, :293].fill_(1.0)
    assert not (rows @ torch.ones(293, 32, dtype=torch.bfloat16, device="cuda")).isnan().any()


def test_outside_a_test_of_it_there_is_no_gpu() -> None:
    assert not torch.cuda.is_available()
    assert torch.accelerator.current_accelerator(check_available=True) is None


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ("cpu", lambda on, off: on + off),
        ("cpu", lambda on, off: torch.where(on > 0, on, off)),
        ("cpu", lambda on, off: functional.embedding(off.long(), on)),
        ("cpu", lambda on, off: on.index_put_((torch.zeros(2, dtype=torch.long),), off)),
        ("cuda:1", lambda on, off: on + off),
    ],
)
def test_tensors_of_two_devices_are_refused(gpu: Gpu, other: str, fault) -> None:
    with pytest.raises(RuntimeError, match=rf"two devices, cuda:0 and {other}"):
        fault(torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device=other))
    # A number of the host is not.
    assert (torch.ones(2, device="cuda") * torch.tensor(3.0)).tolist() == [3, 3]


@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1, 2], device="cuda"),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.cpu(),
    ],
    ids=["item", "bool", "mask", "from_list", "host_index", "to_host"],
)
def test_waiting_and_copying_during_a_capture_are_refused(gpu: Gpu, fault) -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match=CAPTURING), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fault(x)


def test_pinned_memory_may_be_copied_during_a_capture(gpu: Gpu) -> None:
    host, there = torch.ones(3).pin_memory(), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there.copy_(host, non_blocking=True)
    assert there.tolist() == [0, 0, 0]
    graph.replay()
    assert there.tolist() == [1, 1, 1]


def test_a_captured_graph_computes_when_it_is_replayed(gpu: Gpu) -> None:
    x, weight = torch.ones(2, 3, device="cuda"), torch.full((3, 3), 2.0, device="cuda")
    kept = torch.zeros(2, 3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x @ weight).relu()
        kept[1] = y[1]
    assert y.isnan().all()  # a program that reads it now reads garbage
    assert kept.sum().item() == 0
    graph.replay()
    assert y.tolist() == [[6, 6, 6], [6, 6, 6]]
    assert kept.sum(dim=1).tolist() == [0, 18]
    x.fill_(2.0)
    graph.replay()
    assert y[0, 0].item() == 12


def test_a_graph_does_not_see_a_tensor_that_replaces_its_input(gpu: Gpu) -> None:
    layer, x = nn.Linear(2, 1, bias=False).to("cuda"), torch.ones(1, 2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(x)
    before = layer.weight.data
    layer.weight.data = torch.full((1, 2), 5.0, device="cuda")  # new memory: the fault
    graph.replay()
    assert y.item() == before.sum().item() != 10


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (lambda layer, x: setattr(layer.weight, "data", torch.ones(2, 2, device="cuda")), "freed"),
        (lambda layer, x: x.clear(), "freed"),
        (lambda layer, x: x[0].resize_(9), "moved"),
        (lambda layer, x: x.pop(), "freed"),
    ],
    ids=["weight", "input", "resized", "pinned"],
)
def test_a_graph_whose_memory_is_gone_is_not_replayed(gpu: Gpu, fault, error: str) -> None:
    layer, x = nn.Linear(2, 2).to("cuda"), [torch.ones(1, 2, device="cuda")]
    x.append(torch.ones(1, 2).pin_memory())
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(x[0])
        y += x[1].to("cuda", non_blocking=True)
    graph.replay()
    fault(layer, x)
    site = r"captured at tests/pretend_cuda/test_faults\.py:\d+"
    with pytest.raises(RuntimeError, match=rf"{site}: Float \[\d, 2\] of aten::\w+ .*{error}"):
        graph.replay()


def test_a_variable_that_was_read_cannot_be_set(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    with monkeypatch.context() as late:
        torch.ones(1, device="cuda")
        late.setenv("CUDA_VISIBLE_DEVICES", "0")  # no change
        late.setenv("NCCL_DEBUG", "INFO")  # no group has started
        place = r"tests/pretend_cuda/test_faults\.py:\d+"
        for name, value in {"PYTORCH_ALLOC_CONF": "x", "CUDA_VISIBLE_DEVICES": "1"}.items():
            with pytest.raises(RuntimeError, match=f"{name} is set after CUDA .* at {place}"):
                os.environ[name] = value
        with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES is set after CUDA"):
            del os.environ["CUDA_VISIBLE_DEVICES"]


def test_norms_under_autocast_are_fp32(gpu: Gpu) -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cuda", torch.bfloat16):
        here = functional.linear(x, x)
        there = functional.linear(x.to("cuda"), x.to("cuda"))
        assert there.dtype is here.dtype is torch.bfloat16
        normed = functional.layer_norm(x.to("cuda").bfloat16(), (8,), weight.to("cuda"))
        rms = functional.rms_norm(x.to("cuda").bfloat16(), (8,), weight.to("cuda"))
    assert normed.dtype is rms.dtype is torch.float32
    memory = torch.zeros(2, 8, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match="dtype"):
        memory[torch.zeros(1, dtype=torch.long, device="cuda")] = normed[:1]


def test_memory_ends_at_the_size_of_the_card(gpu: Gpu) -> None:
    before = gpu.used
    kept = torch.zeros(GIB // 8, dtype=torch.int8, device="cuda")
    assert gpu.used - before == GIB // 8
    gpu.limit(before + GIB // 4)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.zeros(GIB // 4, dtype=torch.int8, device="cuda")
    del kept
    assert gpu.used == before
    assert gpu.peak >= before + GIB // 8


def test_events_are_counted_with_their_line(gpu: Gpu) -> None:
    keep_BS = torch.tensor([[True, True, False]], device="cuda")
    ids_BS = torch.tensor([[4, 5, 6]], device="cuda")
    batch = SequenceBatch(ids_BS, keep_BS, keep_BS)
    with gpu.counting() as counts:
        TokenPositions.from_batch(batch)
    (line,) = counts.lines(Event.sync)
    assert line.startswith("base/types.py:")
    assert counts.events[Event.sync] == 1
    with gpu.counting() as counts:
        torch.ones(3).to("cuda").cpu()
        torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    assert [counts.events[each] for each in (Event.to_device, Event.to_host)] == [1, 1]
    assert counts.events[Event.to_device_pinned] == 1


def test_a_copy_to_pinned_memory_arrives_when_the_host_waits(gpu: Gpu) -> None:
    ours = torch.zeros(2).pin_memory()
    ours.copy_(torch.ones(2, device="cuda"), non_blocking=True)
    assert ours.isnan().all(), "not yet"
    there = ours.to("cuda", non_blocking=True)  # the device has made the first copy by then
    assert there.tolist() == [1.0, 1.0]
    ours.copy_(torch.full((2,), 3.0, device="cuda"), non_blocking=True)
    mark = torch.cuda.Event()
    mark.record()
    mark.synchronize()
    assert ours.tolist() == [3.0, 3.0]
