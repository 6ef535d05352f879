"""Rollouts by HTTP on a vLLM server, which loads the actor's weights before each rollout.

The server is vLLM 0.28 or later. It must be started with VLLM_SERVER_DEV_MODE=1 to accept new
weights. Its routes: vllm/entrypoints/rl/online/api_router.py and .../openai/completion/protocol.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from rlhf.base.decoder_modules import end_token_ids
from rlhf.base.errors import RolloutError
from rlhf.base.heartbeat import beat
from rlhf.base.ranks import Ranks
from rlhf.base.types import Engine, PromptBatch, Responses
from rlhf.rollout.fast import Sampled, pad_responses, unpad_prompts
from rlhf.rollout.sampling import SamplingSettings

START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL_FOLDER --logprobs-mode processed_logprobs "
    "--no-enable-prefix-caching"
)
AT_ONCE = 64  # number of requests in flight, which the server decodes in one batch
SECONDS_TO_CONNECT = 5.0

# A function that writes the actor's weights into a folder, tensor by tensor.
# Every rank calls the function; only rank 0 passes the folder, the other ranks pass None.
WriteWeights = Callable[[Engine, Path | None], None]


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of ``VllmServerRollout``, from the keys of the config group ``rollout``."""

    url: str
    timeout: float
    weights_dir: Path
    stop: list[str]


class VllmServerRollout:
    """A ``RolloutBackend`` that samples on a vLLM server.

    Rank 0 writes the weights to a folder that the server reads. Every rank then checks that the
    server has the version just written, and requests the responses to its own prompts.
    """

    def __init__(
        self,
        sampling: SamplingSettings,
        settings: ServerSettings,
        *,
        write: WriteWeights,
        pad_id: int,
        ranks: Ranks,
    ) -> None:
        self._sampling = sampling
        self._settings = settings
        self._write = write
        self._pad_id = pad_id
        self._ranks = ranks
        self._client = VllmClient(settings.url, timeout=settings.timeout)

    def generate(self, actor: Engine, prompts: PromptBatch) -> Responses:
        """Return one response per prompt.

        Raises:
            RolloutError: if the server fails, or samples with weights other than the actor's.
        """
        version = self._send_weights(actor)
        self._require_weight_version(version)
        seeds = (prompts.draws_BT[:, 0].double() * 2**31).long().tolist()
        sampled = self._client.sample(unpad_prompts(prompts), seeds, self._vllm_settings(actor))
        self._require_weight_version(version)
        return pad_responses(sampled, pad_id=self._pad_id, device=prompts.ids_BP.device)

    def _send_weights(self, actor: Engine) -> str:
        """Make the server load the actor's weights; return their version, a unique name.

        Every rollout does this: an evaluation may have swapped in the weights' moving average.
        """
        folder = self._settings.weights_dir / f"rlhf-weights-{uuid4().hex}"
        versions = [folder.name]
        if self._ranks.is_main:
            folder.mkdir(parents=True)
        try:
            self._write(actor, folder if self._ranks.is_main else None)
            if self._ranks.is_main:
                self._client.load_weights(folder, folder.name)
        finally:
            if self._ranks.is_main:
                shutil.rmtree(folder, ignore_errors=True)
        if self._ranks.size > 1:
            torch.distributed.broadcast_object_list(versions, src=0)
        return versions[0]

    def _require_weight_version(self, version: str) -> None:
        found = self._client.fetch_weight_version()
        if found != version:
            raise RolloutError(
                f"rollout.server.url={self._settings.url}: it samples with the weights {found}, "
                f"and this step needs {version}: another run gives it weights, or it was started "
                "again; give every run a server of its own"
            )

    def _vllm_settings(self, actor: Engine) -> dict[str, object]:
        """Return the sampling settings under vLLM's names; they replace all server defaults."""
        sampling = self._sampling
        return {
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,  # else vLLM would use the end tokens of its own model folder
            "stop_token_ids": list(end_token_ids(actor.module.pretrained)),
            "stop": self._settings.stop,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }


class VllmClient:
    """A client for the HTTP routes of one server; its errors name the server and the fix."""

    def __init__(self, url: str, *, timeout: float) -> None:
        import urllib3

        self._url = url.rstrip("/")
        # No retries: a request that fails half-way may have changed the server's state.
        self._pool = urllib3.PoolManager(
            maxsize=AT_ONCE,
            retries=False,
            timeout=urllib3.Timeout(connect=SECONDS_TO_CONNECT, read=timeout),
        )

    def check(self, *, ties_embeddings: bool = False) -> None:
        """Check that the server runs in vLLM's dev mode, with log-probs after the temperature.

        ``ties_embeddings`` is True if the model's output layer shares its embedding's weights.
        """
        self.fetch_weight_version()
        config = self._request("GET", "/server_info?config_format=json")["vllm_config"]
        mode = config["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise self._build_error(
                f"its log-probabilities are {mode}, before the temperature; start it with "
                "--logprobs-mode processed_logprobs"
            )
        if ties_embeddings and config["device_config"]["device"] == "cpu":
            raise self._build_error(
                "on a CPU, vLLM keeps the output layer that it started with if the model ties it "
                "to the embeddings; use a server on a GPU, or an untied model "
                "(model.architecture.tie_word_embeddings=false)"
            )

    def fetch_weight_version(self) -> str:
        """Return the version of the weights that the server samples with."""
        found = self._request("GET", "/weight_info")
        return str(found["weight_version"])

    def load_weights(self, folder: Path, version: str) -> None:
        """Replace the server's weights with the weights in ``folder``, which the server can read.

        Requests in progress finish first; the server then clears its caches.
        """
        self._request("POST", "/pause?mode=wait")
        try:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self._request("POST", "/collective_rpc", call)
            self._request("POST", "/update_weight_version", {"new_version": version})
        finally:
            self._request("POST", "/resume")

    def sample(
        self, prompts: list[list[int]], seeds: list[int], settings: Mapping[str, Any]
    ) -> list[Sampled]:
        """Return one response per prompt; ``settings`` are sampling options under vLLM's names."""
        model = self._request("GET", "/v1/models")["data"][0]["id"]
        shared = {"model": model, "logprobs": 0, "return_token_ids": True, **settings}

        def sample_one(prompt: list[int], seed: int) -> Sampled:
            body = {**shared, "prompt": prompt, "seed": seed}
            (choice,) = self._request("POST", "/v1/completions", body)["choices"]
            beat()
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if len(ids) != len(logprobs):
                raise self._build_error(
                    f"{len(ids)} tokens came with {len(logprobs)} log-probabilities"
                )
            return Sampled(ids, logprobs, choice["finish_reason"] == "stop")

        with ThreadPoolExecutor(min(AT_ONCE, len(prompts))) as threads:
            return list(threads.map(sample_one, prompts, seeds))

    def _request(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        import urllib3

        # A new connection per request: the server may close an idle one as a request arrives on it.
        headers = {"Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            answer = self._pool.request(
                method,
                self._url + route,
                body=None if body is None else json.dumps(body),
                headers=headers,
            )
        except urllib3.exceptions.ReadTimeoutError as error:
            raise self._build_error(
                f"{route} gave no answer in time; raise rollout.server.timeout_seconds"
            ) from error
        except urllib3.exceptions.HTTPError as error:
            raise self._build_error(f"nothing answers ({error}); start it with {START}") from error
        if answer.status == HTTPStatus.NOT_FOUND:
            raise self._build_error(
                f"it has no {route.partition('?')[0]}: it must be vLLM 0.28 or later, started with "
                f"{START}"
            )
        if answer.status != HTTPStatus.OK:
            text = answer.data.decode(errors="replace")[:300]
            raise self._build_error(f"{route} answered {answer.status}: {text}")
        try:
            return json.loads(answer.data) if answer.data.strip() else {}
        except ValueError as error:
            raise self._build_error(f"{route} answered no JSON ({answer.data[:80]!r})") from error

    def _build_error(self, reason: str) -> RolloutError:
        return RolloutError(f"rollout.server.url={self._url}: {reason}")
