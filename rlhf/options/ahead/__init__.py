"""Sampling beside training, by a policy that is some updates older (docs/algorithms.md)."""
