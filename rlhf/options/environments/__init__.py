"""Episodes of several turns with tools, games or users, instead of single responses."""
