"""Training engines, each of which runs one model with plain torch or with DeepSpeed."""
