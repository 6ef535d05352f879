"""Evaluate the models of a finished run: ``python -m rlhf.evaluate RUN_DIR``."""
