"""Low-rank adapters: few weights are trained, and the base model's weights stay frozen."""
