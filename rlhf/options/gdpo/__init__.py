"""GDPO: normalise each reward over the responses to a prompt before the rewards are added.

https://arxiv.org/abs/2601.05242. It costs nothing. Use it if several rewards should all count:
GRPO normalises their sum, so the reward that varies most decides the advantages, and responses with
different rewards can get equal advantages. Do not use it if the rewards' own scales matter: a
reward that hardly varies counts as much as the others.
"""
