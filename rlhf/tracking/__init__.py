"""Output of a run: metrics, samples, progress and the final summary."""
