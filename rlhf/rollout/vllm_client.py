"""The HTTP interface of a vLLM server that samples responses: weights, versions, completions.

The server is vLLM 0.28 or later, started with VLLM_SERVER_DEV_MODE=1, without which it takes no new
weights. Its routes: vllm/entrypoints/rl/online/api_router.py and .../openai/completion/protocol.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.errors import RolloutError

START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL_FOLDER --logprobs-mode processed_logprobs "
    "--no-enable-prefix-caching"
)
AT_ONCE = 64  # requests in flight; vLLM batches them as they come
SECONDS_TO_CONNECT = 5.0


class Sampled(NamedTuple):
    """One response: its tokens with their log-probabilities, and whether it ended by itself."""

    ids: list[int]
    logprobs: list[float]
    has_ended: bool


class VllmClient:
    """A client of one server; its errors name the server and the fix."""

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
        """Check that the server answers, takes weights, and returns log-probs of what it samples.

        ``ties_embeddings`` is True if the model's output layer is its embedding.

        Raises:
            RolloutError: if one of these checks fails.
        """
        self.fetch_weight_version()
        config = self._request("GET", "/server_info?config_format=json")["vllm_config"]
        mode = config["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise self._error(
                f"its log-probabilities are {mode}, before the temperature; start it with "
                "--logprobs-mode processed_logprobs"
            )
        if ties_embeddings and config["device_config"]["device"] == "cpu":
            raise self._error(
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

        def one(prompt: list[int], seed: int) -> Sampled:
            body = {**shared, "prompt": prompt, "seed": seed}
            (choice,) = self._request("POST", "/v1/completions", body)["choices"]
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if len(ids) != len(logprobs):
                raise self._error(f"{len(ids)} tokens came with {len(logprobs)} log-probabilities")
            return Sampled(ids, logprobs, choice["finish_reason"] == "stop")

        with ThreadPoolExecutor(min(AT_ONCE, len(prompts))) as threads:
            return list(threads.map(one, prompts, seeds))

    def _request(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        import urllib3

        # The server closes idle connections between rollouts, perhaps as a request is on its way.
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
            raise self._error(
                f"{route} gave no answer in time; raise rollout.server.timeout_seconds"
            ) from error
        except urllib3.exceptions.HTTPError as error:
            raise self._error(f"nothing answers ({error}); start it with {START}") from error
        if answer.status == HTTPStatus.NOT_FOUND:
            raise self._error(
                f"it has no {route.partition('?')[0]}: it must be vLLM 0.28 or later, started with "
                f"{START}"
            )
        if answer.status != HTTPStatus.OK:
            text = answer.data.decode(errors="replace")[:300]
            raise self._error(f"{route} answered {answer.status}: {text}")
        try:
            return json.loads(answer.data) if answer.data.strip() else {}
        except ValueError as error:
            raise self._error(f"{route} answered no JSON ({answer.data[:80]!r})") from error

    def _error(self, reason: str) -> RolloutError:
        return RolloutError(f"rollout.server.url={self._url}: {reason}")
