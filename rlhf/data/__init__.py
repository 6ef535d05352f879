"""Read, convert, split, tokenize and batch examples, and generate the synthetic task."""
