"""Several turns with tools, games or users in place of one response (docs/environments.md)."""
