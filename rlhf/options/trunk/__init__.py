"""Actor, critic and reference that share the lower layers of one model."""
