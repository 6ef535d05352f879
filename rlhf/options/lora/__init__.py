"""Low-rank adapters: train a few weights, and keep the base model."""
