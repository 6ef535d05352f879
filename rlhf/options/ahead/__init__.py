"""Sampling of later steps' responses with older weights, also during training (rollout.lag)."""
