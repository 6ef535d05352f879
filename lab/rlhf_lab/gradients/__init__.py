"""Compare the gradient of a configuration's loss with the exact gradient of its objective.

The objective is J = E[score] - kl_ctl * KL(policy || reference). On a task of a few short responses
all responses are listed, so that J, its gradient and the expected gradient of the loss are sums:
``enumerated.py`` lists the responses, ``expected.py`` computes PPO's targets and loss on them, and
``causes.py`` finds the keys that explain a bias. The tables of benchmarks/papers/gradients.py use
the same task.
"""
