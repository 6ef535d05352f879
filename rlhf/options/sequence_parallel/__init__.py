"""Sequences that several ranks share: each rank has a part of the tokens (DeepSpeed-Ulysses)."""
