"""Answers of several models beside one another, in the report's section on an evaluation."""

from __future__ import annotations

from typing import Any

from rlhf.report.run_page import MOST_PROMPTS, _side_by_side_rows


def answer(prompt: str, model: str, score: float | None, sample: int = 0) -> dict[str, Any]:
    said = f"{model} {sample}"
    keys = {"prompt": f"{prompt} ", "model": model, "decoder": "sampled", "sample": sample}
    return {**keys, "response": said, "score": score}


def test_the_first_answer_of_each_model_stands_in_its_column() -> None:
    answers = [
        answer("one", "sft", 0.5),
        answer("one", "sft", 0.75, sample=1),
        answer("one", "actor", None),
        answer("two", "actor", 1.0),
    ]
    assert _side_by_side_rows(answers) == [
        {
            "prompt": "one",
            "sft, sampled": "sft 0 (score 0.50)",
            "actor, sampled": "actor 0 (score not finite)",
        },
        {"prompt": "two", "actor, sampled": "actor 0 (score 1.00)"},
    ]


def test_the_first_prompts_are_shown_by_every_model() -> None:
    prompts = [str(number) for number in range(MOST_PROMPTS + 2)]
    rows = _side_by_side_rows([answer(p, m, 1.0) for m in ("sft", "actor") for p in prompts])
    assert [row["prompt"] for row in rows] == prompts[:MOST_PROMPTS]
    assert all("actor, sampled" in row for row in rows)
