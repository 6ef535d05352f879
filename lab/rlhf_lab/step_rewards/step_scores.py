"""Score the steps of responses with the user's function."""

from __future__ import annotations

import math
import re
from pathlib import Path

from rlhf.base.errors import RewardError
from rlhf.config.schema.keys import LARGEST_SCORE
from rlhf.config.schema.rewards import RewardTerm
from rlhf.rewards.isolated import RewardScorer
from rlhf.rewards.outside import build_function_reward
from rlhf.rewards.rules import Answers, PartScores, ScoreFunction

COUNT = "steps"  # criterion: the number of steps of a response


class StepScorer(RewardScorer):
    """A scorer of the steps of a response."""

    def build(self, part: RewardTerm, run_dir: Path) -> tuple[ScoreFunction, list[str]]:
        """Return a function that scores every step, and the name of its criterion.

        A step is scored as a response to the prompt followed by the earlier steps.
        """
        return _build_score_function(part), [COUNT]


def _build_score_function(part: RewardTerm) -> ScoreFunction:
    score, pattern = build_function_reward(part), re.compile(str(part.pattern))

    def score_steps(answers: Answers) -> PartScores:
        ends = [find_step_ends(text, pattern) for text in answers.responses]
        scores, count = score(_cut_into_steps(answers, ends)), sum(map(len, ends))
        if len(scores) != count:
            raise RewardError(f"it returned {len(scores)} scores for {count} steps")
        # A sum with a NaN is NaN, so a response has a score only if all its steps have scores.
        following = iter([x if abs(x) <= LARGEST_SCORE else math.nan for x in scores])
        steps = [[(end, next(following)) for end in step_ends] for step_ends in ends]
        sums = [sum(score for _, score in scored_steps) for scored_steps in steps]
        return PartScores(sums, {COUNT: [float(len(step_ends)) for step_ends in ends]}, steps=steps)

    return score_steps


def find_step_ends(text: str, pattern: re.Pattern[str]) -> list[int]:
    """Return the character offsets at which the steps of ``text`` end.

    A step ends where ``pattern`` ends, and the last step at the end of the text. Every text has a
    step, and only the step of an empty text is empty.
    """
    ends = {match.end() for match in pattern.finditer(text)} - {0}
    return sorted(ends | {len(text)})


def _cut_into_steps(answers: Answers, ends: list[list[int]]) -> Answers:
    """Return the steps as responses; a step's prompt is the prompt and all earlier steps."""
    rows, prompts, steps = [], [], []
    for row, step_ends in enumerate(ends):
        text = answers.responses[row]
        for start, end in zip([0, *step_ends], step_ends, strict=False):
            rows.append(row)
            prompts.append(answers.prompts[row] + text[:start])
            steps.append(text[start:end])
    columns = {name: [values[row] for row in rows] for name, values in answers.columns.items()}
    return answers._replace(prompts=prompts, responses=steps, columns=columns)
