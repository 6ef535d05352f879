"""C kernels for CPUs, and the layers, decoder and optimizer that use them."""
