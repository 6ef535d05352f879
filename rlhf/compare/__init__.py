"""A local page to compare the answers of two models by hand: ``python -m rlhf.compare RUN_DIR``."""
