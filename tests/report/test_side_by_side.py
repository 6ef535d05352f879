"""Answers of several models beside one another, in the report's section on an evaluation."""

import json
from pathlib import Path

from rlhf.base.stored_files import EVALUATION
from rlhf.report.run_page import MOST_PROMPTS, read_evaluation


def test_the_first_answer_of_each_model_to_the_first_prompts_stands_in_its_column(
    tmp_path: Path,
) -> None:
    prompts = [str(number) for number in range(MOST_PROMPTS + 2)]
    answers = [
        {"prompt": f"{prompt} ", "model": model, "decoder": "sampled", "sample": sample}
        | {"response": f"{model} {sample}", "score": 0.5 if model == "sft" else None}
        | {"kl": 0.0, "tokens": 2, "ended": True, "right": None}
        for model in ("sft", "actor")
        for prompt in prompts
        for sample in (0, 1)
    ]
    path = tmp_path / EVALUATION
    path.parent.mkdir()
    path.write_text(json.dumps({"models": {}, "win_rates": []}))
    path.with_name("answers.jsonl").write_text("\n".join(map(json.dumps, answers)))
    found = read_evaluation(tmp_path)
    assert found is not None
    answered = {
        "sft, sampled": "sft 0 (score 0.50)",
        "actor, sampled": "actor 0 (score not finite)",
    }
    assert found.side_by_side == [{"prompt": p} | answered for p in prompts[:MOST_PROMPTS]]
