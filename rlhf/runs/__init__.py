"""The registry of runs: list, compare, relate and clean them, from their files alone."""
