"""Instrument that shows runs and sweeps while they run: a local page, or a terminal screen."""
