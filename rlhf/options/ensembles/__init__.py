"""Several reward models, whose scores are combined to one score."""
