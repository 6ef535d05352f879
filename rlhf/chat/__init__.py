"""Chat with a model of a run: ``python -m rlhf.chat RUN_DIR`` (docs/use.md)."""
