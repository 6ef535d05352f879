"""Digests of the weights after some steps, which ``python -m rlhf.replay`` compares."""
