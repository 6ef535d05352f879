"""The judge of the generated task, as peers call a reward function. Needs only the task's rules."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.data.synthetic import rate_response


class GoldJudge:
    """The gold score as TRL's reward function; ``given`` keeps the scores of each step."""

    __name__ = "gold"

    def __init__(self, end_id: int) -> None:
        self._end_id = end_id
        self.given: list[list[float]] = []

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **_: object,
    ) -> list[float]:
        """Rate the answers of one step."""
        rows = zip(prompts, completions, completion_ids, strict=True)
        self.given.append(
            [
                rate_response(prompt, answer, ended=ids[-1] == self._end_id).gold
                for prompt, answer, ids in rows
            ]
        )
        return self.given[-1]
