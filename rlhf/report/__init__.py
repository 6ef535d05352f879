"""Reports of runs as HTML pages, comparisons of runs, and trackers for MLflow and Trackio."""
