"""What a run with the further options of PPO leaves in its directory."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.runs import metrics

pytestmark = pytest.mark.slow


def test_the_moving_average_is_a_model_beside_the_actor(option_run: Path) -> None:
    from transformers import AutoModelForCausalLM

    sft, actor, average = (
        dict(AutoModelForCausalLM.from_pretrained(option_run / name).named_parameters())
        for name in ("sft/model", "ppo/actor", "ppo/actor_ema")
    )
    assert sft.keys() == actor.keys() == average.keys()

    def distance(model: dict[str, torch.Tensor]) -> float:
        return sum(float((model[name] - sft[name]).detach().norm()) for name in sft)

    assert 0 < distance(average) < distance(actor), "the average lags behind"
    assert "score_after_ema" in json.loads((option_run / "ppo" / "result.json").read_text())


def test_the_corpus_is_learned_from_and_judged(option_run: Path) -> None:
    lines = [line for line in metrics(option_run) if line["phase"] == "ppo"]
    assert [line["step"] for line in lines if line.get("ppo/ptx_loss", 0) > 0] == [1, 2]
    result = json.loads((option_run / "ppo" / "result.json").read_text())
    assert result["corpus_perplexity_after"] < 2 * result["corpus_perplexity_before"]


def test_rollouts_of_whole_steps_are_logged_and_shown(option_run: Path) -> None:
    lines = [json.loads(line) for line in (option_run / "rollouts.jsonl").read_text().splitlines()]
    assert Counter(line["step"] for line in lines) == {2: 16}
    groups = Counter(line["prompt"] for line in lines)
    assert all(count % 2 == 0 for count in groups.values()), "ppo.responses_per_prompt=2"
    (logged,) = [
        each
        for each in metrics(option_run)
        if (each["phase"], each["step"]) == ("ppo", 2) and "ppo/score_mean" in each
    ]
    mean = sum(line["score"] for line in lines) / len(lines)
    assert mean == pytest.approx(logged["ppo/score_mean"], abs=1e-4)
    page = (option_run / "report.html").read_text()
    assert "<option>responses that PPO learned from</option>" in page
