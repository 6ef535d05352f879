"""What two ranks save under ZeRO-3 is what they computed with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.rounding import assert_near, terms_of
from tests.runs import TORCHRUN, python

pytestmark = pytest.mark.slow


def test_saved_models_give_the_live_logits_and_values(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    run = python(*TORCHRUN, "-m", "tests.engine.zero3_rank", tmp_path)
    assert run.returncode == 0, run.stderr
    shard, whole = map(int, (tmp_path / "shard.txt").read_text().split())
    assert shard < 0.6 * whole, "each rank held about half of the weights"
    live = load_file(tmp_path / "live.safetensors")
    probe = torch.arange(8)[None]

    actor = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    assert_near(actor(probe).logits, live["logits"], terms=terms_of(actor, 8))
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    values = critic.score(critic.model(probe).last_hidden_state).squeeze(-1)
    assert_near(values, live["values"], terms=terms_of(critic, 8))
