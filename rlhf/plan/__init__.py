"""Memory, time and cost of a configuration before it starts."""
