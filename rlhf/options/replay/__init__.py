"""Digests of the weights after some steps; ``python -m rlhf.replay`` compares two runs' digests."""
