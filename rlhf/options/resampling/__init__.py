"""DAPO's dynamic sampling: replace prompts whose responses all have the same score.

https://arxiv.org/abs/2503.14476. Each round samples as many prompts again as had equal scores; use
it with an estimator that compares responses, if many groups teach nothing.
"""
