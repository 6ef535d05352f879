"""Norms, rotary embeddings and SwiGLU of trained and scoring models by Liger's Triton kernels.

Liger (https://github.com/linkedin/Liger-Kernel, BSD 2-Clause) computes each layer in one launch,
forward and backward. Its losses are not used: rlhf/models/output_layer.py never stores all logits.
"""
