"""The work before ranks start: read the command; check, plan and freeze each configuration."""
