"""Corrections for rollouts whose log-probabilities differ from the trainer's."""
