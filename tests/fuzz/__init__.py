"""Hostile inputs, drawn from a seed, at every door through which other people's files come in.

Each of DOORS is a function ``cases(draw, folder)``, which yields hostile inputs without end.
``judged`` tries one in a process of its own. A user may see one of two things: the input is
refused with a message, or it does no harm. A traceback, a hang, or an input accepted that had to be
refused is a fault.

    python -m tests.fuzz [--cases 700] [--seed 1] [--door NAME]     (make soak)
"""
