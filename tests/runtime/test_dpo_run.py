"""SFT and DPO in one run, as a user starts it."""

import json
import math
from pathlib import Path

import pytest

from tests.runs import metrics

pytestmark = pytest.mark.slow


def test_dpo_starts_from_the_sft_model_and_learns(dpo_run: Path) -> None:
    lines = [line for line in metrics(dpo_run) if line["phase"] == "dpo"]
    steps = [line for line in lines if "dpo/loss" in line]
    result = json.loads((dpo_run / "result.json").read_text())["phases"]["dpo"]
    assert [line["step"] for line in steps] == list(range(1, result["steps"] + 1))
    assert steps[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[0]["dpo/margin"] == pytest.approx(0, abs=1e-6)
    assert [line["dpo/learning_rate"] for line in steps[:2]] == pytest.approx([5e-4, 1e-3])
    assert {line["step"] for line in lines if "dpo/eval_accuracy" in line} == {
        line["step"] for line in steps
    }
    assert result["kl_before"] == pytest.approx(0, abs=1e-5)
    assert abs(result["kl_after"]) > 0
