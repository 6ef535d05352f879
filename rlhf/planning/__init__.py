"""Estimate memory, time and cost of a run from its configuration, before the run starts."""
