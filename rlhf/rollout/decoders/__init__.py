"""Models that take one token at a time, with what they remember in preallocated memory."""
