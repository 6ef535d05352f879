"""``rollout.backend=vllm_server``: a vLLM server, which gets the weights before each rollout."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

from rlhf.base.decoder_modules import end_token_ids
from rlhf.base.ranks import Ranks
from rlhf.base.types import Engine, PromptBatch, Responses
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Device
from rlhf.config.schema.run import RunConfig
from rlhf.models.shapes import shape_of
from rlhf.options.vllm.vllm_client import BY_NCCL, START, VllmClient
from rlhf.options.vllm.weight_transfer import ServerWeights
from rlhf.phases.shared.backends import BackendParts
from rlhf.phases.shared.exporting import Export, build_export
from rlhf.rollout.fast import pad_responses, unpad_prompts
from rlhf.rollout.sampling import SamplingSettings

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


class VllmServerRollout:
    """A ``RolloutBackend`` that samples on a vLLM server.

    Rank 0 sends the weights. Every rank then checks that the server has the version just sent, and
    requests the responses to its own prompts.
    """

    def __init__(
        self,
        sampling: SamplingSettings,
        stop: Sequence[str],
        weights: ServerWeights,
        *,
        export: Callable[[Engine], Export],
        pad_id: int,
        ranks: Ranks,
    ) -> None:
        self._sampling = sampling
        self._stop = list(stop)
        self._weights = weights
        self._client = weights.client
        self._export = export
        self._pad_id = pad_id
        self._ranks = ranks
        self._version = ""

    def generate(self, actor: Engine, prompts: PromptBatch) -> Responses:
        """Return one response per prompt.

        Raises:
            RolloutError: if the server fails, or samples with weights other than the actor's.
        """
        if not prompts.continues:
            self._version = self._send_weights(actor)
        self._require_weight_version()
        seeds = (prompts.draws_BT[:, 0].double() * 2**31).long().tolist()
        sampled = self._client.sample(unpad_prompts(prompts), seeds, self._vllm_settings(actor))
        self._require_weight_version()
        return pad_responses(sampled, pad_id=self._pad_id, device=prompts.ids_BP.device)

    def _send_weights(self, actor: Engine) -> str:
        """Give the server the actor's weights; return their version, on every rank.

        Every rollout does this: an evaluation may have swapped in the weights' moving average.
        """
        export, version = self._export(actor), ""
        if self._ranks.is_main:
            version = self._weights.replace(export)
        else:
            export.write(None)
        return self._ranks.all_gather(version)[0]

    def _require_weight_version(self) -> None:
        found = self._client.fetch_weight_version()
        if found != self._version:
            raise self._client.build_error(
                f"it samples with the weights {found}, and this step needs {self._version}: "
                "another run gives it weights, or it was started again; give every run a server of "
                "its own"
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
            "stop": self._stop,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
