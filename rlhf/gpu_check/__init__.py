"""python -m rlhf.gpu_check: check what this project does on the GPU of this machine."""
