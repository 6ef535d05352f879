"""Sampling of responses by a vLLM server."""
