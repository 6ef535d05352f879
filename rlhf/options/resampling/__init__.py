"""DAPO's dynamic sampling: replace prompts whose responses all have the same score.

https://arxiv.org/abs/2503.14476. Each round samples for as many new prompts as have equal scores.
Use it with an estimator that compares the responses to a prompt, if many prompts teach nothing.
"""
