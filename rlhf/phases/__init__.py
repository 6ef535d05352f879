"""The phases of training (SFT, reward model, PPO, DPO), each a loop that follows its paper."""
