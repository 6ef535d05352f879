"""Name the argument that takes a model's KV cache, which transformers 5.24 renamed."""

from __future__ import annotations

from collections.abc import Container

CACHE_NAMES = ("cache", "past_key_values")  # from transformers 5.24 on, and before


def cache_argument(parameters: Container[str]) -> str | None:
    """Return which of ``CACHE_NAMES`` is among the parameters of a call; None: neither."""
    return next((name for name in CACHE_NAMES if name in parameters), None)
