"""A reward of your own: any function of prompts and responses.

    PYTHONPATH=examples python launch.py phase=pipeline_rule data.size=30000 \\
        'rewards.vowels={kind: function, function: "my_rewards:vowels", run_code: true}'
"""

from __future__ import annotations

from collections.abc import Sequence


def vowels(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:  # noqa: ARG001 - unread
    """Return a score for each response: its number of vowels, over 8."""
    return [sum(letter in "aeiou" for letter in response) / 8 for response in responses]
