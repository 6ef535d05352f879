"""A server with vLLM's routes, for tests: it counts connections and receives weights over gloo.

Its workers form the group that a run's process joins with torch.cuda.nccl, which the class
``Gloo`` replaces: the unique id then has the port of a store instead of NCCL's address.
"""

from __future__ import annotations

import json
import socket
import time
from base64 import b64decode
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import prod
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore

END = 1
SECONDS_TO_WAIT = 20.0


class StandIn:
    """A server with vLLM's routes, and what it was asked."""

    def __init__(self, *, workers: int = 2) -> None:
        self.version, self.paused = "default", False
        self.loaded: list[list[str]] = []
        self.asked: list[dict[str, Any]] = []
        self.routes: list[str] = []
        self.mode = "processed_logprobs"
        self.transfer: dict[str, str] | None = {"backend": "nccl"}
        self.failures: dict[str, tuple[int, str]] = {}
        self.version_after_sampling: str | None = None
        self.seconds = 0.0  # of each response
        self.waits_for = 0  # responses are sent when this many requests are in flight
        self.connections = self.in_flight = self.most_in_flight = 0
        self.closes_on: str | None = None  # the next request of this route ends its connection
        self.is_gone = False
        self._dies_after: int | None = None  # number of tensors that workers receive
        self.workers: list[Worker] = [Worker() for _ in range(workers)]
        self._counting, self._enough = Lock(), Event()
        self._open: list[socket.socket] = []
        self._server = _Server(("127.0.0.1", 0), self._build_handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        Thread(target=self._server.serve_forever, args=[0.02], daemon=True).start()

    def _build_handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections are kept
            disable_nagle_algorithm = True  # or a body waits for the ACK of its headers

            def setup(self) -> None:
                super().setup()
                with stand_in._counting:
                    stand_in.connections += 1
                    stand_in._open.append(self.connection)

            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                self._answer(json.loads(self.rfile.read(size)) if size else None)

            def _answer(self, body: Any) -> None:
                route = self.path.partition("?")[0]
                status, text = stand_in.failures.get(route, (200, ""))
                try:
                    if status == 200 and not text:
                        text = json.dumps(stand_in.answer(route, body))
                except ConnectionError:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def close(self) -> None:
        """End the server and its connections, each of which is a descriptor of this process."""
        self._server.shutdown()
        for connection in self._open:
            with suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        # Or whoever frees the sender's group waits for a broadcast that no worker receives.
        self.workers.clear()

    def dies_during_update(self, *, after: int) -> None:
        """End all connections after this number of tensors of the next update."""
        self._dies_after = after

    def answer(self, route: str, body: Any) -> Any:
        if self.is_gone:
            raise ConnectionError
        self.routes.append(route)
        if route == self.closes_on:
            self.closes_on = None
            raise ConnectionError
        if route in self._facts():
            return self._facts()[route]
        match route:
            case "/pause" | "/resume":
                self.paused = route == "/pause"
            case "/collective_rpc":
                assert self.paused, "requests must end before the weights change"
                assert body["method"] == "reload_weights"
                folder = Path(body["kwargs"]["weights_path"])
                self.loaded.append(sorted(path.name for path in folder.iterdir()))
            case "/init_weight_transfer_engine":
                self._on_workers(lambda worker, index: worker.join(body["init_info"], index))
            case "/start_weight_update" | "/finish_weight_update":
                assert self.paused
                self.version = (body or {}).get("weight_version", self.version)
            case "/update_weights":
                info = body["update_info"]
                self._on_workers(lambda worker, _: worker.receive(**info, most=self._dies_after))
                if self._dies_after is not None:
                    self.is_gone = True
                    raise ConnectionError
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/v1/completions":
                return self._complete(body)
        return {}

    def _facts(self) -> dict[str, Any]:
        config: dict[str, Any] = {"model_config": {"logprobs_mode": self.mode}}
        config |= {"device_config": {"device": "cpu"}, "weight_transfer_config": self.transfer}
        return {
            "/weight_info": {"weight_version": self.version},
            "/server_info": {"vllm_config": config},
            "/v1/models": {"data": [{"id": "policy"}]},
            "/get_world_size": {"world_size": len(self.workers)},
        }

    def _on_workers(self, call: Callable[[Worker, int], None]) -> None:
        threads = [Thread(target=call, args=pair[::-1]) for pair in enumerate(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _complete(self, body: Any) -> Any:
        assert not self.paused
        with self._counting:
            self.asked.append(body)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            if self.most_in_flight >= self.waits_for:
                self._enough.set()
        self._enough.wait(SECONDS_TO_WAIT)
        time.sleep(self.seconds)
        ids = [5 + (sum(body["prompt"]) + body["seed"]) % 7] * (len(body["prompt"]) % 3 + 1) + [END]
        if self.version_after_sampling is not None:
            self.version = self.version_after_sampling
        choice = {
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-body["seed"] / 2**31] * len(ids)},
            "finish_reason": "stop" if len(ids) < 4 else "length",
        }
        with self._counting:
            self.in_flight -= 1
        return {"choices": [choice]}


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024  # a rollout's requests come at once


class Worker:
    """A GPU of the server: it receives tensors as vLLM's NCCLWeightTransferEngine does."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self._group: Group | None = None

    def join(self, info: dict[str, Any], index: int) -> None:
        rank = info["rank_offset"] + index
        self._group = Group(b64decode(info["nccl_unique_id_b64"]), rank, info["world_size"])
        self._group.sum(torch.zeros(1))

    def receive(
        self,
        names: Sequence[str],
        dtype_names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        most: int | None,
    ) -> None:
        assert self._group is not None
        for name, dtype, shape in list(zip(names, dtype_names, shapes, strict=True))[:most]:
            kind = getattr(torch, dtype)
            raw = torch.empty(prod(shape) * kind.itemsize, dtype=torch.uint8)
            self._group.broadcast(raw).wait()
            self.weights[name] = raw.view(kind).view(shape)
        if most is not None:
            self._group = None  # closes its connections


class Group:
    """Ranks that compute together over gloo; rank 0 of a broadcast sends."""

    def __init__(self, unique_id: bytes, rank: int, size: int) -> None:
        store = TCPStore("127.0.0.1", int(unique_id.rstrip(b"\0")), size, is_master=False)
        self._group = ProcessGroupGloo(store, rank, size, timedelta(seconds=SECONDS_TO_WAIT))

    def sum(self, tensor: Tensor) -> None:
        self._group.allreduce([tensor]).wait()

    def broadcast(self, raw: Tensor) -> Any:
        return self._group.broadcast(raw, 0)


class Gloo:
    """The functions of torch.cuda.nccl, over gloo; like those, a broadcast does not wait."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._sending: list[Any] = []

    def unique_id(self) -> bytes:
        return str(self._store.port).encode().ljust(128, b"\0")

    def init_rank(self, size: int, unique_id: bytes, rank: int) -> Group:
        return Group(unique_id, rank, size)

    def all_reduce(self, tensors: list[Tensor], comms: list[Group]) -> None:
        (tensor,), (group,) = tensors, comms
        assert tensor.is_cuda
        group.sum(tensor.cpu())

    def broadcast(self, tensors: list[Tensor], comms: list[Group]) -> None:
        (tensor,), (group,) = tensors, comms
        assert tensor.is_cuda
        assert tensor.is_contiguous()
        raw = tensor.cpu().view(-1).view(torch.uint8)
        self._sending.append((group.broadcast(raw), raw))

    def is_done(self) -> bool:
        """Return True if all broadcasts have ended; raise the error of one that failed."""
        for work, _ in self._sending:
            if not work.is_completed():
                return False
            work.wait()
        self._sending.clear()
        return True
