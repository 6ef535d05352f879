"""Every end token of a model's generation_config.json ends a response, in every phase."""

import json
from pathlib import Path

import pytest

from rlhf.evaluate.__main__ import evaluate
from rlhf.export import main as export
from tests.models_on_disk import save_models
from tests.runs import finished, soaked


def ends_of(folder: Path) -> list[int]:
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", soaked(["fast", "hf"], "hf"))
def test_all_end_tokens_end_responses_until_the_export(backend: str, tmp_path: Path) -> None:
    save_models(tmp_path, policy="words", reward="words")
    ends = [1, *range(2, 250)]  # nearly all of the vocabulary, so that nearly all responses end
    settings = tmp_path / "policy" / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": ends}))
    words = ["phase=ppo", "model=pretrained", f"model.path={tmp_path / 'policy'}"]
    run = finished(
        tmp_path / "run", *words, "model@reward_model=gold", f"rollout={backend}", "ppo.steps=1"
    )
    result = json.loads((run / "ppo" / "result.json").read_text())
    assert result["ended_share_before"] > 0.9
    assert result["ended_share_after"] > 0.9
    assert ends_of(run / "ppo" / "actor") == ends
    assert export([str(run), "--out", str(tmp_path / "out")]) == 0
    assert ends_of(tmp_path / "out") == ends
    if backend == "fast":
        decoders = evaluate(run, samples=1, temperatures=[])["models"]["ppo"]["decoders"]
        rows = (run / "evaluation" / "answers.jsonl").read_text().splitlines()
        assert decoders
        assert sum(json.loads(row)["ended"] for row in rows) > 0.9 * len(rows)
