"""Keys of the vLLM server."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import ABOVE_0, NO_PHASE, SECONDS, Names, key, needs


@dataclass(kw_only=True)
class ServerConfig:
    """Settings of the server that backend=vllm_server uses (docs/rollouts.md)."""

    url: str
    """Address of a vLLM server that no other run uses."""
    timeout_seconds: float = key(SECONDS)
    """Longest time for one answer: a response, or loading the weights."""
    weights_dir: str | None = key(names=Names.place)
    """Folder for weights that are not sent over NCCL; null: a temporary folder of this machine."""
    gpus: int | None = key(ABOVE_0)
    """Number of the server's GPUs, all of the ranks' type, for plans; null: plans omit its time."""


@dataclass(kw_only=True)
class ServerKeys:
    """Keys of the group ``rollout`` for the vLLM server."""

    server: ServerConfig = key(affects=NO_PHASE, unread=[needs("rollout.backend", "vllm_server")])
    """Options of backend=vllm_server."""
