"""Compare the gradient of a configuration's loss with the exact gradient of its objective.

The objective is J = E[score] - kl_ctl * KL(policy || reference). On a task of a few short responses
all responses are listed, so that J, its gradient and the expected gradient of the loss are sums:
``enumerated.py`` lists them, ``expected.py`` runs the targets and the loss of PPO on them, and
``causes.py`` finds the keys that explain a bias. The tables of benchmarks/papers/gradients.py are
made with the same task.
"""
