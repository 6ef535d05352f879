"""What the CPU does much faster in C than through torch; compiled where it runs, and optional."""
