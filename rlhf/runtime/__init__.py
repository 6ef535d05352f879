"""Start the ranks of a run, and run the phases on each rank."""
