"""A pretraining loss on a corpus, added to PPO's loss (InstructGPT's PPO-ptx)."""
