"""The backend ``rollout.backend=vllm_server``, built from the keys of ``rollout.server``."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import TYPE_CHECKING

from rlhf.base.user_paths import expand_user_path
from rlhf.config.schema.run import RunConfig
from rlhf.options.vllm.vllm_server import ServerSettings, VllmClient, VllmServerRollout
from rlhf.phases.shared.backends import BackendParts
from rlhf.phases.shared.exporting import write_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

IS_SERVER = True


def check(config: RunConfig, model: PreTrainedConfig | None) -> None:
    """Raise RolloutError if the server cannot be used for this ``model``."""
    server = config.rollout.server
    ties = model is not None and model.tie_word_embeddings
    VllmClient(server.url, timeout=server.timeout_seconds).check(ties_embeddings=ties)


def build(config: RunConfig, parts: BackendParts) -> VllmServerRollout:
    """Return the backend that samples from the server."""
    server = config.rollout.server
    settings = ServerSettings(
        url=server.url,
        timeout=server.timeout_seconds,
        weights_dir=expand_user_path(
            server.weights_dir or tempfile.gettempdir(), key="rollout.server.weights_dir"
        ),
        stop=list(config.rollout.stop),
    )
    return VllmServerRollout(
        parts.settings,
        settings,
        write=partial(write_weights, config),
        pad_id=parts.pad_id,
        ranks=parts.ranks,
    )
