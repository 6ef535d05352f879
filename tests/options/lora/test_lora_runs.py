"""A run with adapters measures the models that it saves."""

import json
from pathlib import Path

import pytest

from tests.models_on_disk import save_base, small_tokenizer
from tests.runs import finished, python

WORDS = "model=pretrained lora=all lora.lr=1e-2 hardware.dtype=bf16 rollout.max_response_tokens=8"


@pytest.mark.slow
def test_measures_are_those_of_the_saved_models(tmp_path: Path) -> None:
    """In bf16, where a merged weight is not the sum of a weight and its adapter."""
    save_base(tmp_path / "base", "llama", small_tokenizer())
    run = finished(tmp_path / "run", *WORDS.split(), f"model.path={tmp_path / 'base'}")
    phases = json.loads((run / "result.json").read_text())["phases"]
    evaluated = python("-m", "rlhf.evaluate", run, "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    models = json.loads(evaluated.stdout)["models"]
    perplexity = phases["sft"]["perplexity_after"]
    assert models["sft"]["perplexity"] == pytest.approx(perplexity, rel=1e-6)
    actor = models["ppo"]["decoders"]["sampled"]
    measured = {name: phases["ppo"][f"{name}_after"] for name in ("score", "kl")}
    assert {name: actor[name] for name in measured} == pytest.approx(measured, rel=1e-6)
    assert actor["kl"] != 0
