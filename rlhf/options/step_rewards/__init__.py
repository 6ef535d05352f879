"""Step rewards: score each step of a response, and reward the token at which the step ends.

As with process supervision, https://arxiv.org/abs/2211.14275, https://arxiv.org/abs/2305.20050. The
function of the reward is called for each step instead of each response. Use it if a step can be
judged by itself, and responses are long. Do not use it if only the end can be judged.
"""
