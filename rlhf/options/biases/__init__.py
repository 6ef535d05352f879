"""Corrupt a score on purpose, so that the step at which reward hacking can begin is known.

A part with kind=bias adds ``weight`` times a bias to the sum of the other rewards from PPO step
``onset`` on, as CHERRL (https://arxiv.org/abs/2606.04923) adds a bias to a judge's score. Use it to
test what notices hacking, never for a model that is to be used: the score measures no quality.
"""
