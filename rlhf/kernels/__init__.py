"""Optional C kernels for work that a CPU does much faster in C than in torch."""
