"""Conversations with the models of a run: load them, answer, follow commands."""
