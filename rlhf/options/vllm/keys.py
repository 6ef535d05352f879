"""Keys of the vLLM server."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import ABOVE_0, NO_PHASE, SECONDS, Names, key, needs


@dataclass(kw_only=True)
class ServerConfig:
    """Settings of the server that backend=vllm_server uses (docs/rollouts.md)."""

    url: str
    """Address of a vLLM server of this run's own."""
    timeout_seconds: float = key(SECONDS)
    """Longest time for one answer: a response, or loading the weights."""
    weights_dir: str | None = key(names=Names.place)
    """Folder for weights that do not go by NCCL; null: a temporary folder of this machine."""
    gpus: int | None = key(ABOVE_0)
    """GPUs of the server, of the ranks' kind: plans count its time; null: plans leave it out."""


@dataclass(kw_only=True)
class ServerKeys:
    """Keys of the group ``rollout`` for the vLLM server."""

    server: ServerConfig = key(affects=NO_PHASE, unread=[needs("rollout.backend", "vllm_server")])
    """Options of backend=vllm_server."""
