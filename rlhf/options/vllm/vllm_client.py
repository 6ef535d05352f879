"""A client of a vLLM server, version 0.28 or later.

vLLM's source defines the routes in vllm/entrypoints/openai/completion/protocol.py and, only for a
server that was started with VLLM_SERVER_DEV_MODE=1, in vllm/entrypoints/rl/online/api_router.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import Any

from rlhf.base.errors import RolloutError
from rlhf.base.heartbeat import beat
from rlhf.rollout.fast import Sampled

START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL_FOLDER --logprobs-mode processed_logprobs"
WITH_FP32_LOGITS = """--hf-overrides '{"head_dtype": "float32"}'"""
BY_NCCL = """--weight-transfer-config '{"backend": "nccl"}'"""
AT_ONCE = 512  # number of requests in flight, which the server decodes in one batch
SECONDS_TO_CONNECT = 5.0
# Routes that must not be called again if the connection breaks off: they may have taken effect.
NOT_REPEATED = ("/init_weight", "/start_weight", "/update_weights", "/finish_weight")


class VllmClient:
    """A client for the HTTP routes of one server; its errors name the server and the fix.

    ``start`` is the command that starts such a server.
    """

    def __init__(self, url: str, *, timeout: float, start: str = START) -> None:
        import urllib3

        self.url = url.rstrip("/")
        self._start = start
        # Connections are kept for the next requests, and the next rollout.
        self._pool = urllib3.PoolManager(
            maxsize=AT_ONCE,
            block=True,
            retries=False,
            timeout=urllib3.Timeout(connect=SECONDS_TO_CONNECT, read=timeout),
        )

    def check(self, *, ties_embeddings: bool = False) -> None:
        """Check that the server runs in vLLM's dev mode, with log-probs after the temperature.

        ``ties_embeddings`` is True for a tied output layer, which a CPU server cannot update.
        """
        self.fetch_weight_version()
        config = self.fetch_config()
        mode = config["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise self.build_error(
                f"its log-probabilities are {mode}, before the temperature; start it with "
                "--logprobs-mode processed_logprobs"
            )
        if ties_embeddings and config["device_config"]["device"] == "cpu":
            raise self.build_error(
                "on a CPU, vLLM keeps the output layer that it started with if the model ties it "
                "to the embeddings; use a server on a GPU, or an untied model "
                "(model.architecture.tie_word_embeddings=false)"
            )

    def fetch_config(self) -> Any:
        """Return the server's VllmConfig as JSON values."""
        return self.request("GET", "/server_info?config_format=json")["vllm_config"]

    def fetch_weight_version(self) -> str:
        """Return the version of the weights that the server samples with."""
        return str(self.request("GET", "/weight_info")["weight_version"])

    def sample(
        self, prompts: list[list[int]], seeds: list[int], settings: Mapping[str, Any]
    ) -> list[Sampled]:
        """Return one response per prompt; ``settings`` are sampling options under vLLM's names."""
        model = self.request("GET", "/v1/models")["data"][0]["id"]
        shared = {"model": model, "logprobs": 0, "return_token_ids": True, **settings}

        def sample_one(prompt: list[int], seed: int) -> Sampled:
            body = {**shared, "prompt": prompt, "seed": seed}
            (choice,) = self.request("POST", "/v1/completions", body)["choices"]
            beat()
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if len(ids) != len(logprobs):
                raise self.build_error(
                    f"{len(ids)} tokens came with {len(logprobs)} log-probabilities"
                )
            return Sampled(ids, logprobs, choice["finish_reason"] == "stop")

        with ThreadPoolExecutor(min(AT_ONCE, len(prompts))) as threads:
            return list(threads.map(sample_one, prompts, seeds))

    def request(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON with which a route answers ``body``; {} if the answer is empty."""
        import urllib3

        try:
            answer = self._request_on_kept_connection(method, route, body)
        except urllib3.exceptions.ReadTimeoutError as error:
            raise self.build_error(
                f"{route} gave no answer in time; raise rollout.server.timeout_seconds"
            ) from error
        except urllib3.exceptions.HTTPError as error:
            raise self.build_error(
                f"nothing answers ({error}); start a server with {self._start}"
            ) from error
        if answer.status == HTTPStatus.NOT_FOUND:
            raise self.build_error(
                f"it has no {route.partition('?')[0]}: it must be vLLM 0.28 or later, started with "
                f"{self._start}"
            )
        if answer.status != HTTPStatus.OK:
            text = answer.data.decode(errors="replace")[:300]
            raise self.build_error(f"{route} answered {answer.status}: {text}")
        try:
            return json.loads(answer.data) if answer.data.strip() else {}
        except ValueError as error:
            raise self.build_error(f"{route}: answer is not JSON ({answer.data[:80]!r})") from error

    def _request_on_kept_connection(
        self, method: str, route: str, body: Mapping[str, Any] | None
    ) -> Any:
        """Return the answer to one request.

        The server may close an idle connection just as a request is sent on it. The request is then
        sent once more, if its route may be called twice.
        """
        import urllib3

        send = partial(self._pool.request, method, self.url + route, json=body)
        try:
            return send()
        except urllib3.exceptions.ProtocolError:
            if route.startswith(NOT_REPEATED):
                raise
            return send()

    def build_error(self, reason: str) -> RolloutError:
        """Return an error that names the server."""
        return RolloutError(f"rollout.server.url={self.url}: {reason}")
