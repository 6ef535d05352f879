"""Clip-Cov: leave a few of the tokens that cost the policy most entropy out of the losses.

https://arxiv.org/abs/2505.22617. It costs nothing. Use it if the entropy falls early in training
and the score then stops rising. Do not use it if the policy should become certain.
"""
