"""``rollout.backend=vllm_server``: a vLLM server, which gets the weights before each rollout.

It receives them by NCCL, or else through a folder that it reads. The server's side of NCCL is
NCCLWeightTransferEngine of vllm/distributed/weight_transfer/ (0.33).
"""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch import Tensor

from rlhf.base.decoder_modules import end_token_ids
from rlhf.base.errors import RolloutError
from rlhf.base.ranks import Ranks
from rlhf.base.types import Engine, PromptBatch, Responses
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Device
from rlhf.config.schema.run import RunConfig
from rlhf.models.shapes import shape_of
from rlhf.options.vllm.vllm_client import BY_NCCL, START, WITH_FP32_LOGITS, VllmClient
from rlhf.phases.shared.backends import BackendParts
from rlhf.phases.shared.exporting import Export, build_export
from rlhf.rollout.fast import pad_responses, unpad_prompts
from rlhf.rollout.sampling import SamplingSettings
from rlhf.run.model_folder import copy_folder_permissions, hold_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SHARE_FOR_WEIGHTS = 0.7  # share of a GPU's memory; vLLM uses 0.92 for weights and KV cache
CHUNK_BYTES = 2**29  # size of the tensors that are copied and announced to the server together
POLL_SECONDS = 1e-4
cuda: Any = torch.cuda  # some of its functions have no types
logger = logging.getLogger(__name__)


def require_server(config: RunConfig, model: PreTrainedConfig | None) -> None:
    """Raise RolloutError if the server cannot be used for this ``model``."""
    ties = model is not None and model.tie_word_embeddings
    _open_client(config).check(ties_embeddings=ties)


def build_server_backend(config: RunConfig, parts: BackendParts) -> VllmServerRollout:
    """Return the backend that samples from the server."""
    folder = expand_user_path(
        config.rollout.server.weights_dir or tempfile.gettempdir(), key="rollout.server.weights_dir"
    )
    return VllmServerRollout(
        parts.settings,
        config.rollout.stop,
        _open_weights(_open_client(config), folder, parts.ranks.device),
        export=partial(build_export, config),
        pad_id=parts.pad_id,
        ranks=parts.ranks,
    )


def build_start_command(config: RunConfig) -> str:
    """Return the command that starts a server for the policy, on as many GPUs as it needs."""
    shape, memory_gib, gpus = shape_of(config.model), config.hardware.memory_gib, 1
    start = f"{START} {WITH_FP32_LOGITS}" if config.hardware.keeps_fp32_logits else START
    if config.hardware.device is Device.cpu:
        return start
    room = (memory_gib or math.inf) * 2**30 * SHARE_FOR_WEIGHTS
    while shape is not None and 2 * shape.weights > gpus * room:  # bytes in half precision
        gpus *= 2
    return f"{start} {BY_NCCL} --tensor-parallel-size {gpus}"


def _open_client(config: RunConfig) -> VllmClient:
    server = config.rollout.server
    start = build_start_command(config)
    return _open_server(server.url, timeout=server.timeout_seconds, start=start)


@dataclass
class VllmServerRollout:
    """A ``RolloutBackend`` that samples on a vLLM server.

    Rank 0 sends the weights. Every rank then checks that the server has the version just sent, and
    requests the responses to its own prompts.
    """

    sampling: SamplingSettings
    stop: Sequence[str]
    weights: ServerWeights
    export: Callable[[Engine], Export]
    pad_id: int
    ranks: Ranks

    def generate(self, actor: Engine, prompts: PromptBatch) -> Responses:
        """Return one response per prompt.

        Raises:
            RolloutError: if the server fails, or samples with weights other than the actor's.
        """
        if not prompts.keeps_weights:
            self.weights.version = self._send_weights(actor)
        self._require_weight_version()
        seeds = (prompts.draws_BT[:, 0].double() * 2**31).long().tolist()
        sampled = self.weights.client.sample(
            unpad_prompts(prompts), seeds, self._vllm_settings(actor)
        )
        self._require_weight_version()
        return pad_responses(sampled, pad_id=self.pad_id, device=prompts.ids_BP.device)

    def _send_weights(self, actor: Engine) -> str:
        """Give the server the actor's weights; return their version, on every rank.

        Evaluations send weights too, since they may have swapped in the moving average.
        """
        export, version = self.export(actor), ""
        if self.ranks.is_main:
            version = self.weights.replace(export)
        else:
            export.write(None)
        return self.ranks.all_gather(version)[0]

    def _require_weight_version(self) -> None:
        used = self.weights.client.fetch_weight_version()
        if used != self.weights.version:
            raise self.weights.client.build_error(
                f"it samples with the weights {used}, and this step needs {self.weights.version}: "
                "another run sent it weights, or it was restarted; give every run its own server"
            )

    def _vllm_settings(self, actor: Engine) -> dict[str, object]:
        """Return the sampling settings under vLLM's names; they replace all server defaults."""
        sampling = self.sampling
        return {
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,  # else vLLM would use the end tokens of its own model folder
            "stop_token_ids": list(end_token_ids(actor.module.pretrained)),
            "stop": list(self.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }


class ServerWeights:
    """The weights of a server, which rank 0 replaces."""

    def __init__(self, client: VllmClient, folder: Path, device: torch.device) -> None:
        self.client = client
        self._folder = folder
        self._device = device
        self._send: Callable[[Export, str], None] | None = None
        self.version = ""  # version of the weights that this process sent last

    def replace(self, export: Export) -> str:
        """Give the server the weights of ``export``; return their version, a unique name.

        Requests in progress finish first. The prefix cache, which the old weights computed, is
        emptied. A server that has only a part of the weights stays paused.
        """
        version = f"rlhf-weights-{uuid4().hex}"
        self.client.request("POST", "/pause?mode=wait")
        self._send = self._send or self._choose_sender()
        self._send(export, version)
        if not self.client.request("POST", "/reset_prefix_cache").get("success", True):
            raise self.client.build_error("it did not empty its prefix cache")
        self.client.request("POST", "/resume")
        return version

    def _choose_sender(self) -> Callable[[Export, str], None]:
        """Return the function that sends weights, by NCCL if possible; print which one."""
        try:
            group = NcclGroup(self.client, self._device)
        except (RolloutError, RuntimeError) as error:
            message = f"weights go through the folder {self._folder} ({error})"
            logger.warning("rollout.server.url=%s: %s", self.client.url, message)
            return self._send_by_folder
        message = f"weights go over NCCL to {group.workers} GPUs"
        logger.warning("rollout.server.url=%s: %s", self.client.url, message)
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
        pending = call_in_background(self._client.request, "POST", "/update_weights", update)
        try:
            for tensor in tensors.values():
                cuda.nccl.broadcast([tensor], comms=[self._group])
                self._wait(pending)
            pending.result()
        except (RolloutError, RuntimeError) as error:
            raise self._client.build_error(
                f"it did not receive all weights ({error}); see its log, start it again, and "
                "continue the run with resume=RUN_DIR"
            ) from error

    def _wait(self, pending: Future[Any]) -> None:
        """Wait until the GPU has sent its tensors, or raise the error of the server.

        The host must not wait in CUDA: a broadcast to a worker that has ended never returns.
        """
        sent = cuda.Event()
        sent.record()
        while not sent.query():
            if pending.done():
                pending.result()
            time.sleep(POLL_SECONDS)


def call_in_background(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call ``function`` in a thread; if it hangs, it does not keep this process from ending."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=call, daemon=True).start()
    return future


_open_server = cache(VllmClient)  # all backends of this process share its connections
# The weights of the server for all backends of this process, since a server is in one NCCL group.
_open_weights = cache(ServerWeights)
