"""Results of a run's phases: its objective, which must be finite, and its plan beside them."""

import json
import math
from pathlib import Path

import pytest

from rlhf.base.errors import CheckpointError, RlhfError
from rlhf.base.finite_numbers import restore_nan
from rlhf.config.choices import SPLIT_PHASES, Phase
from rlhf.config.freeze import FROZEN
from rlhf.report.comparison import read_compared_run
from rlhf.report.summary import summary_table
from rlhf.run.results import phase_result_path, read_objective, write_json
from rlhf.runtime.phase_runs import (
    collect_results,
    compare_run_with_plan,
    find_objective,
    require_finite_objective,
)

RESULTS = {
    "sft": {"perplexity_after": 2.5},
    "reward": {"accuracy": 0.75},
    "ppo": {"score_after": 1.5},
    "dpo": {"accuracy": 0.625},
}


@pytest.mark.parametrize(
    ("order", "extra", "objective"),
    [
        ([Phase.sft], {}, -2.5),
        ([Phase.sft, Phase.reward], {}, 0.75),
        ([*SPLIT_PHASES], {}, 1.5),
        ([*SPLIT_PHASES], {"gold_after": 0.8}, 0.8),
        ([Phase.sft, Phase.dpo], {}, 0.625),
        ([Phase.sft, Phase.dpo], {"gold_after": 0.8}, 0.8),
    ],
)
def test_the_objective_is_that_of_the_last_phase(
    order: list[Phase], extra: dict[str, float], objective: float, tmp_path: Path
) -> None:
    for phase, result in RESULTS.items():
        last = extra if phase in ("ppo", "dpo") else {}
        write_json(phase_result_path(tmp_path, phase), result | last)
    assert collect_results(order, tmp_path)["objective"] == objective


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


SFT = {"perplexity_before": 3.0, "perplexity_after": 2.0, "reused_from": "a", "seconds": 5.0}


def test_memory_is_that_of_the_phases_that_the_run_trained(tmp_path: Path) -> None:
    costs = {"hours": 0.1, "memory_gib_per_rank": 2.0}
    plan = {"hours": 0.1, "memory_gib_limit": 9.0, "phases": {"sft": costs}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for ran in ([Phase.sft], []):  # by the run itself, and by each resume of it
        found = compare_run_with_plan(tmp_path, {"sft": SFT}, ran)
        assert found["planned"] == {"hours": 0.1, "memory_gib": 2.0}
        assert list(found["measured"]) == ["hours"]
        summary_table({"objective": -2.0, "phases": {"sft": SFT}, "versions": {}, **found}, "")
    own = {"seconds": 7.0, "measured": {"memory_gib": 1.5}}
    found = compare_run_with_plan(tmp_path, {"sft": SFT, "reward": own}, [Phase.reward])
    assert found["measured"]["memory_gib"] == 1.5


def test_a_run_takes_no_less_time_than_its_phases(tmp_path: Path) -> None:
    """A phase that continued after a checkpoint counts the time of earlier processes too."""
    own = {"measured": {"memory_gib": 1.5}}
    phases = {"sft": own | {"seconds": 1e6}, "ppo": own | {"seconds": 1e7}}
    found = compare_run_with_plan(tmp_path, phases, [Phase.ppo])
    assert found["measured"]["hours"] == pytest.approx(1.1e7 / 3600)
    found = compare_run_with_plan(tmp_path, phases, [])
    assert found["measured"]["hours"] == pytest.approx(1.1e7 / 3600, rel=0.01)
