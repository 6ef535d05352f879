"""Before ranks start: the command is read, and each job checked, planned and frozen."""
