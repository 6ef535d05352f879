"""Sampling of responses by DeepSpeed's Hybrid Engine."""
