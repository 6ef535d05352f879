"""Decoders: models that generate token by token with a preallocated KV cache."""
