"""DAPO's dynamic sampling: replace prompts whose responses all have the same score."""
