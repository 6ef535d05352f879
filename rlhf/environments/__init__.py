"""Environments: what the policy talks to over several turns, and what rewards it."""
