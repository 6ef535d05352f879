"""Lists, compares and cleans runs, and shows which came from which, from their files only."""
