"""New weights for a vLLM server: by NCCL, or else through a folder that the server reads.

The server's side of NCCL is NCCLWeightTransferEngine of vllm/distributed/weight_transfer/ (0.33).
"""

from __future__ import annotations

import logging
import shutil
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from concurrent.futures import Future, as_completed
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from rlhf.base.errors import RolloutError
from rlhf.options.vllm.vllm_client import BY_NCCL, VllmClient
from rlhf.phases.shared.exporting import Export
from rlhf.run.model_folder import copy_folder_permissions, hold_tensors

CHUNK_BYTES = 2**29  # size of the tensors that are copied and announced to the server together
POLL_SECONDS = 1e-4

cuda: Any = torch.cuda  # some of its functions have no types
logger = logging.getLogger(__name__)


class ServerWeights:
    """The weights of a server, which rank 0 replaces."""

    def __init__(self, client: VllmClient, folder: Path, device: torch.device) -> None:
        self.client = client
        self._folder = folder
        self._device = device
        self._send: Callable[[Export, str], None] | None = None

    def replace(self, export: Export) -> str:
        """Give the server the weights of ``export``; return their version, a unique name.

        Requests in progress finish first. The prefix cache, which the old weights computed, is
        emptied. A server that has only a part of the weights stays paused.
        """
        version = f"rlhf-weights-{uuid4().hex}"
        self.client.request("POST", "/pause?mode=wait")
        self._send = self._send or self._choose_way()
        self._send(export, version)
        if not self.client.request("POST", "/reset_prefix_cache").get("success", True):
            raise self.client.build_error("it did not empty its prefix cache")
        self.client.request("POST", "/resume")
        return version

    def _choose_way(self) -> Callable[[Export, str], None]:
        """Return the function that sends weights, by NCCL if possible; print which it is."""
        try:
            group = NcclGroup(self.client, self._device)
        except (RolloutError, RuntimeError) as error:
            found = f"weights go through the folder {self._folder} ({error})"
            logger.warning("rollout.server.url=%s: %s", self.client.url, found)
            return self._send_by_folder
        found = f"weights go by NCCL to {group.workers} GPUs"
        logger.warning("rollout.server.url=%s: %s", self.client.url, found)
        return group.send

    def _send_by_folder(self, export: Export, version: str) -> None:
        folder = self._folder / version
        folder.mkdir(parents=True)
        try:
            export.write(folder)
            copy_folder_permissions(folder)  # the server may run as another user
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self.client.request("POST", "/collective_rpc", call)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.client.request("POST", "/update_weight_version", {"new_version": version})


class NcclGroup:
    """An NCCL group of this process, which is rank 0, and the workers of a server."""

    def __init__(self, client: VllmClient, device: torch.device) -> None:
        """Form the group.

        Raises:
            RolloutError: if this process has no GPU, or if the server has no such group or fails.
            RuntimeError: if NCCL fails.
        """
        if device.type != "cuda":
            raise RolloutError("NCCL needs a GPU, and the process that sends weights has none")
        transfer = client.fetch_config().get("weight_transfer_config") or {}
        if transfer.get("backend") != "nccl":
            raise RolloutError(f"the server was started without {BY_NCCL}")
        self.workers: int = client.request("GET", "/get_world_size")["world_size"]
        self._client = client
        self._device = device
        unique_id = cuda.nccl.unique_id()
        info = {
            "nccl_unique_id_b64": b64encode(unique_id).decode(),
            "rank_offset": 1,
            "world_size": self.workers + 1,
        }
        # Both sides return when the other has joined; a side that fails leaves the other waiting.
        sides = [
            call_in_background(self._join, unique_id),
            call_in_background(
                client.request, "POST", "/init_weight_transfer_engine", {"init_info": info}
            ),
        ]
        for side in as_completed(sides):
            side.result()

    def _join(self, unique_id: bytes) -> None:
        cuda.set_device(self._device)  # a new thread uses GPU 0
        self._group = cuda.nccl.init_rank(self.workers + 1, unique_id, 0)
        # vLLM's workers begin with a sum of one number.
        cuda.nccl.all_reduce([torch.zeros(1, device=self._device)], comms=[self._group])
        cuda.synchronize()

    def send(self, export: Export, version: str) -> None:
        """Send all weights of ``export``, in their own dtypes, under the name ``version``."""
        self._client.request("POST", "/start_weight_update")
        stream = export.stream()
        for tensors in hold_tensors(stream, most_bytes=CHUNK_BYTES, device=self._device):
            self._send_tensors(tensors)
        self._client.request("POST", "/finish_weight_update", {"weight_version": version})

    def _send_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        info = {
            "names": list(tensors),
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            "shapes": [list(each.shape) for each in tensors.values()],
        }
        update = {"update_info": info}
        received = call_in_background(self._client.request, "POST", "/update_weights", update)
        try:
            for tensor in tensors.values():
                cuda.nccl.broadcast([tensor], comms=[self._group])
                self._wait(received)
            received.result()
        except (RolloutError, RuntimeError) as error:
            raise self._client.build_error(
                f"it did not receive all weights ({error}); see its log, start it again, and "
                "continue the run with resume=RUN_DIR"
            ) from error

    def _wait(self, received: Future[Any]) -> None:
        """Wait until the GPU has sent its tensors, or raise the error of the server.

        The host must not wait in CUDA: a broadcast to a worker that has ended never returns.
        """
        sent = cuda.Event()
        sent.record()
        while not sent.query():
            if received.done():
                received.result()
            time.sleep(POLL_SECONDS)


def call_in_background(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call ``function`` in a thread that does not keep this process from ending, if it hangs."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=call, daemon=True).start()
    return future
