"""One run directory: checkpoints, results, metrics, trackers and alarms."""
