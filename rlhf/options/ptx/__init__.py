"""Pretraining loss beside PPO, on a corpus (InstructGPT's PPO-ptx)."""
