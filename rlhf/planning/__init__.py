"""Estimate memory, time and cost of a configuration before a run starts; pure arithmetic."""
