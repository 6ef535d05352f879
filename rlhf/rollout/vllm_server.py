"""Rollouts on a vLLM server, which gets the actor's weights before each rollout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch

from rlhf.base.errors import RolloutError
from rlhf.base.ranks import Ranks
from rlhf.base.types import Engine, PromptBatch, Responses
from rlhf.rollout.padding import pad_responses, unpad_prompts
from rlhf.rollout.sampling import SamplingSettings
from rlhf.rollout.vllm_client import VllmClient

# Writes the actor's weights into a folder, tensor by tensor; every rank calls it, and all but rank
# 0 pass None.
WriteWeights = Callable[[Engine, Path | None], None]


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Options of the server; the config group ``rollout`` documents their meaning."""

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
        end_id: int,
        pad_id: int,
        ranks: Ranks,
    ) -> None:
        self._sampling = sampling
        self._settings = settings
        self._write = write
        self._end_id = end_id
        self._pad_id = pad_id
        self._ranks = ranks
        self._client = VllmClient(settings.url, timeout=settings.timeout)

    def generate(self, actor: Engine, prompts: PromptBatch) -> Responses:
        """Return one response per prompt.

        Raises:
            RolloutError: if the server fails, or samples with weights other than the actor's.
        """
        version = self._send_weights(actor)
        self._require_version(version)
        seeds = (prompts.draws_BT[:, 0].double() * 2**31).long().tolist()
        sampled = self._client.sample(unpad_prompts(prompts), seeds, self._vllm_settings())
        self._require_version(version)
        return pad_responses(sampled, pad_id=self._pad_id, device=prompts.ids_BP.device)

    def _send_weights(self, actor: Engine) -> str:
        """Send the actor's weights to the server; return their version, a unique name.

        Every rollout sends the weights: an evaluation may have swapped in the moving average.
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

    def _require_version(self, version: str) -> None:
        found = self._client.fetch_weight_version()
        if found != version:
            raise RolloutError(
                f"rollout.server.url={self._settings.url}: it samples with the weights {found}, "
                f"and this step needs {version}: another run gives it weights, or it was started "
                "again; give every run a server of its own"
            )

    def _vllm_settings(self) -> dict[str, object]:
        """Return the sampling settings under vLLM's names; no default of the server is used."""
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
            "ignore_eos": True,  # use the tokenizer's end token, not the model config's
            "stop_token_ids": [self._end_id],
            "stop": self._settings.stop,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
