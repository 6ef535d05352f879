"""The backend ``rollout.backend=vllm_server``, built from the keys of ``rollout.server``."""

from __future__ import annotations

import math
import tempfile
from functools import cache, partial
from typing import TYPE_CHECKING

from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Device
from rlhf.config.schema.run import RunConfig
from rlhf.models.shapes import shape_of
from rlhf.options.vllm.vllm_client import BY_NCCL, START, VllmClient
from rlhf.options.vllm.vllm_server import VllmServerRollout
from rlhf.options.vllm.weight_transfer import ServerWeights
from rlhf.phases.shared.backends import BackendParts
from rlhf.phases.shared.exporting import build_export

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

IS_SERVER = True
SHARE_FOR_WEIGHTS = 0.7  # of a GPU's memory; vLLM uses 0.92 for weights and KV cache


def check(config: RunConfig, model: PreTrainedConfig | None) -> None:
    """Raise RolloutError if the server cannot be used for this ``model``."""
    ties = model is not None and model.tie_word_embeddings
    _open_client(config).check(ties_embeddings=ties)


def build(config: RunConfig, parts: BackendParts) -> VllmServerRollout:
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
    if config.hardware.device is Device.cpu:
        return START
    room = (memory_gib or math.inf) * 2**30 * SHARE_FOR_WEIGHTS
    while shape is not None and 2 * shape.weights > gpus * room:  # bytes in half precision
        gpus *= 2
    return f"{START} {BY_NCCL} --tensor-parallel-size {gpus}"


def _open_client(config: RunConfig) -> VllmClient:
    server = config.rollout.server
    return _open_server(server.url, server.timeout_seconds, build_start_command(config))


@cache
def _open_server(url: str, timeout: float, start: str) -> VllmClient:
    """Return the client of this process, whose backends share its connections."""
    return VllmClient(url, timeout=timeout, start=start)


# The weights of the server for all backends of this process, since a server is in one NCCL group.
_open_weights = cache(ServerWeights)
