"""Shows runs and sweeps while they run, on a local page or a terminal screen."""
