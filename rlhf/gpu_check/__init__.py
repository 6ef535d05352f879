"""Checks what this project does on the GPU of this machine: ``python -m rlhf.gpu_check``."""
