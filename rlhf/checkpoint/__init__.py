"""The files that a run writes: model folders and results of phases, complete or not at all."""
