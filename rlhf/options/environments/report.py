"""Rows for results of episodes in the summary of a run."""

CHANGES = {
    "return of an episode": "return",
    "share of successes": "success",
    "turns of an episode": "turns",
}
COMPARISON_VALUES = {"optimal return": "optimum", "random turns' return": "random_return"}
