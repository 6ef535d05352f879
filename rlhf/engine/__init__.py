"""Training engines, which run one model with plain torch or with DeepSpeed and its config."""
