"""Optional kernels, in C for CPUs and in Triton for GPUs, that are faster than torch."""
