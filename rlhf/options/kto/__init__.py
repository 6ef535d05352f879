"""KTO: the dpo phase learns from marks (good or bad) of single responses, not from pairs."""
