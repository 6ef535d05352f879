"""Sampling by a vLLM server."""
