"""A run whose objective is not a finite number has failed, and says so."""

import json
import math
from pathlib import Path

import pytest

from rlhf.base.errors import CheckpointError, RlhfError
from rlhf.base.finite_numbers import restore_nan
from rlhf.config.freeze import FROZEN
from rlhf.report.comparison import read_compared_run
from rlhf.report.summary import summary_table
from rlhf.run.results import read_objective, write_json
from rlhf.runtime.phase_runs import find_objective, require_finite_objective

TIMES = {"seconds": 1.0, "measured": {"hours": 0.1, "memory_gib": 1.0}}
BAD = {
    "sft": {"perplexity_before": 2.0, "perplexity_after": math.nan, **TIMES},
    "reward": {"accuracy": math.inf, "accuracy_ci": [0.1, 0.2], **TIMES},
}
RESULT = {"objective": math.inf, "phases": BAD, "versions": {}, "measured": {"hours": 1.0}}


def test_the_error_names_the_measures_and_what_to_do(tmp_path: Path) -> None:
    require_finite_objective({"sft": {"perplexity_after": 2.0}}, tmp_path)
    with pytest.raises(RlhfError) as caught:
        require_finite_objective(BAD, tmp_path)
    text = str(caught.value)
    assert "reward.accuracy is not a finite number" in text
    assert "not finite: sft.perplexity_after, reward.accuracy" in text
    assert "the weights that sft started from" in text
    assert "hardware.dtype=fp32" in text


def test_a_nan_policy_with_a_finite_score_has_failed(tmp_path: Path) -> None:
    ppo = {"score_after": 0.0, "perplexity_before": math.inf, "kl_to_reference": 0.1}
    require_finite_objective({"ppo": ppo}, tmp_path)
    with pytest.raises(RlhfError, match=r"ppo\.kl_to_reference is not a finite number"):
        require_finite_objective({"ppo": ppo | {"kl_to_reference": math.nan}}, tmp_path)


def test_a_result_without_the_measure_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"sft/result\.json has no perplexity_after"):
        find_objective({"sft": {"steps": 2}}, tmp_path)


def test_readers_of_a_failed_run_accept_null(tmp_path: Path) -> None:
    write_json(tmp_path / "result.json", RESULT)
    (tmp_path / FROZEN).write_text("seed: 1\n")
    assert read_objective(tmp_path) is None
    assert read_compared_run(tmp_path).measures == {}
    read = restore_nan(json.loads((tmp_path / "result.json").read_text()))
    assert math.isnan(read["objective"])
    summary_table(read, "")
