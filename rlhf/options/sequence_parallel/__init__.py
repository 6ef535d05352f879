"""Ranks that share each sequence (DeepSpeed-Ulysses)."""
