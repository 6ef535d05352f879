"""A store of finished phases that later runs reuse."""
