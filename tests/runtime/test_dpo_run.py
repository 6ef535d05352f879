"""SFT and DPO in one run, as a user starts it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.runs import finished, metrics

pytestmark = pytest.mark.slow

SHORT = ["phase=pipeline_dpo", "dpo.batch_size=16", "dpo.epochs=0.2", "dpo.eval_every=1"]
SHORT += ["dpo.lr=1e-3", "dpo.warmup_steps=2", "dpo.eval_prompts=8", "dpo.eval_examples=16"]
SHORT += ["model.dropout=0.3"]  # of SFT: DPO learns without, or policy and reference would differ


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("runs") / "run", *SHORT)


def test_dpo_starts_from_the_sft_model_and_learns(run_dir: Path) -> None:
    lines = [line for line in metrics(run_dir) if line["phase"] == "dpo"]
    steps = [line for line in lines if "dpo/loss" in line]
    result = json.loads((run_dir / "result.json").read_text())["phases"]["dpo"]
    assert [line["step"] for line in steps] == list(range(1, result["steps"] + 1))
    assert steps[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[0]["dpo/margin"] == pytest.approx(0, abs=1e-6)
    assert [line["dpo/learning_rate"] for line in steps[:2]] == pytest.approx([5e-4, 1e-3])
    assert {line["step"] for line in lines if "dpo/eval_accuracy" in line} == {
        line["step"] for line in steps
    }
    assert result["kl_before"] == pytest.approx(0, abs=1e-5)
    assert abs(result["kl_after"]) > 0


def test_the_policy_is_an_ordinary_folder(run_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run_dir / "dpo" / "actor"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids_BS = tokenizer("\n\nHuman: hi\n\nAssistant:", return_tensors="pt").input_ids
    logits_BSV = AutoModelForCausalLM.from_pretrained(folder)(ids_BS).logits
    assert logits_BSV.shape == (*ids_BS.shape, len(tokenizer))
