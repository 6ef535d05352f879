"""Memory, time and cost of a configuration, before anything starts; pure arithmetic."""
