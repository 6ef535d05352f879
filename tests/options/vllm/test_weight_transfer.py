"""Weights for a vLLM server: by NCCL, which gloo replaces here, or through a folder."""

from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf.base.errors import RolloutError
from rlhf.config.freeze import to_run_config
from rlhf.models.build import build_actor
from rlhf.options.vllm import server_backend
from rlhf.options.vllm.server_backend import ServerWeights
from rlhf.options.vllm.vllm_client import VllmClient
from rlhf.phases.shared.exporting import Export, build_export
from tests.conftest import Compose
from tests.models_on_disk import disturb, small_tokenizer, source_of
from tests.options.vllm.stand_in import Gloo, StandIn
from tests.pretend_cuda.gpu import Gpu

CPU = torch.device("cpu")


@pytest.fixture
def nccl(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Let gloo do what torch.cuda.nccl does; the weights are on this pretended GPU."""
    gloo = Gloo()
    for name in ("unique_id", "init_rank", "all_reduce", "broadcast"):
        monkeypatch.setattr(torch.cuda.nccl, name, getattr(gloo, name))
    event = SimpleNamespace(record=lambda: None, query=gloo.is_done)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    return torch.device("cuda", gpu.current_device())


@pytest.fixture
def export(compose: Compose) -> Export:
    """A policy with tied embeddings, in two dtypes."""
    model = build_actor(source_of("llama"), small_tokenizer(), seed=1).to(torch.bfloat16)
    model.model.norm.float()
    engine: Any = SimpleNamespace(module=SimpleNamespace(pretrained=model))
    engine.stream_state = lambda tensors: iter(tensors.items())
    return build_export(to_run_config(compose([])), engine)


def weights_of(server: StandIn, folder: Path, device: torch.device) -> ServerWeights:
    return ServerWeights(VllmClient(server.url, timeout=25.0), folder, device)


def test_workers_receive_all_weights_bit_for_bit(
    server: StandIn,
    nccl: torch.device,
    export: Export,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(server_backend, "CHUNK_BYTES", 10_000)
    weights = weights_of(server, tmp_path / "unused", nccl)
    for seed in (1, 2):
        disturb(export.model, seed=seed)
        export.model.to(nccl)
        version = weights.replace(export)
        export.model.to("cpu")
        assert server.version == version
        folder = tmp_path / str(seed)
        export.write(folder)
        saved = load_file(folder / "model.safetensors")
        for worker in server.workers:
            assert worker.weights.keys() == saved.keys()
            for name, tensor in saved.items():
                assert worker.weights[name].dtype == tensor.dtype
                assert worker.weights[name].equal(tensor), name
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16, torch.float32}
    assert server.routes.count("/update_weights") > 4, "several tensors at a time"
    assert server.routes.count("/init_weight_transfer_engine") == 1
    assert server.routes[-3:] == ["/finish_weight_update", "/reset_prefix_cache", "/resume"]
    assert not (tmp_path / "unused").exists()
    assert caplog.messages == [f"rollout.server.url={server.url}: weights go over NCCL to 2 GPUs"]


@pytest.mark.parametrize(
    ("route", "failure", "reason"),
    [
        (None, None, "the server was started without --weight-transfer-config"),
        ("/get_world_size", (404, ""), "it has no /get_world_size"),
        ("/init_weight_transfer_engine", (404, ""), "it has no /init_weight_transfer_engine"),
        ("/init_weight_transfer_engine", (500, "no NCCL"), "answered 500: no NCCL"),
    ],
)
def test_a_server_that_refuses_reads_the_weights_from_the_folder(
    server: StandIn,
    nccl: torch.device,
    export: Export,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    route: str | None,
    failure: tuple[int, str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = Event()
    monkeypatch.setattr(torch.cuda.nccl, "init_rank", lambda *_: ends.wait())  # no other rank joins
    if route is None:
        server.transfer = None
    else:
        server.failures[route] = failure
    weights = weights_of(server, tmp_path, nccl)
    assert [weights.replace(export) for _ in range(2)][-1] == server.version
    assert server.loaded == [["config.json", "generation_config.json", "model.safetensors"]] * 2
    (line,) = caplog.messages
    assert line.startswith(f"rollout.server.url={server.url}: weights go through the folder ")
    assert reason in line
    ends.set()


def test_a_process_without_a_gpu_says_why_it_uses_the_folder(
    server: StandIn, export: Export, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights_of(server, tmp_path, CPU).replace(export)
    assert len(server.loaded) == 1
    assert "(NCCL needs a GPU, and the process that sends weights has none)" in caplog.text


@pytest.mark.parametrize("tensors", [0, 3])
def test_a_server_that_ends_during_a_transfer_is_named(
    server: StandIn, nccl: torch.device, export: Export, tmp_path: Path, tensors: int
) -> None:
    weights = weights_of(server, tmp_path, nccl)
    weights.replace(export)
    server.dies_during_update(after=tensors)
    with pytest.raises(RolloutError) as error:
        weights.replace(export)
    text = str(error.value)
    assert text.startswith(f"rollout.server.url={server.url}: it did not receive all weights (")
    assert text.endswith("start it again, and continue the run with resume=RUN_DIR")
    assert server.loaded == [], "no other way is tried"


def test_a_refused_tensor_ends_the_wait_for_the_gpu(
    server: StandIn, nccl: torch.device, export: Export, tmp_path: Path
) -> None:
    """A worker that has refused receives nothing, so the broadcast to it never ends."""
    weights = weights_of(server, tmp_path, nccl)
    server.failures["/update_weights"] = (500, "no such tensor")
    with pytest.raises(RolloutError, match="/update_weights answered 500: no such tensor"):
        weights.replace(export)
    assert server.paused


def test_a_step_of_a_transfer_is_not_repeated(
    server: StandIn, nccl: torch.device, export: Export, tmp_path: Path
) -> None:
    """It may have taken effect when its connection ended, and vLLM refuses it the second time."""
    server.closes_on = "/start_weight_update"
    with pytest.raises(RolloutError, match="nothing answers"):
        weights_of(server, tmp_path, nccl).replace(export)
    assert server.routes.count("/start_weight_update") == 1


def test_a_server_of_another_user_can_read_the_weights(
    server: StandIn, export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    rpc = VllmClient.request

    def look(client: VllmClient, method: str, route: str, body: Any = None) -> Any:
        if route == "/collective_rpc":
            file = Path(body["kwargs"]["weights_path"]) / "model.safetensors"
            modes.append(file.stat().st_mode & 0o777 ^ file.parent.stat().st_mode & 0o666)
        return rpc(client, method, route, body)

    monkeypatch.setattr(VllmClient, "request", look)
    weights_of(server, tmp_path, CPU).replace(export)
    assert modes == [0], "a file has the permissions of its folder"
