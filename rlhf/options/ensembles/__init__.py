"""Several reward models, trained together and combined to one score."""
