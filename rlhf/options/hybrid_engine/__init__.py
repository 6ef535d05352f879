"""Sampling by DeepSpeed's Hybrid Engine."""
