"""The parts of a check: each module has a function ``tasks``."""
