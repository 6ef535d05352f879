"""Studies of RLHF with the package rlhf, which a run does without.

    python -m rlhf_lab.advise [KEY=VALUE ...]       which advantage estimator suits a task
    python -m rlhf_lab.gradients [KEY=VALUE ...]    the bias of a configuration's gradient

docs/algorithms.md explains both.
"""
