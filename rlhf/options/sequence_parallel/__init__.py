"""Sequences that several ranks share, each with one part of the tokens (DeepSpeed-Ulysses)."""
