"""Rollouts: sample responses to prompts with the actor's current weights."""
