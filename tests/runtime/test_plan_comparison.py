"""Time and memory of a run beside its plan."""

import json
from pathlib import Path

from rlhf.config.choices import Phase
from rlhf.report.summary import summary_table
from rlhf.runtime.phase_runs import compare_run_with_plan

SFT = {"perplexity_before": 3.0, "perplexity_after": 2.0, "reused_from": "a", "seconds": 5.0}


def test_a_run_that_took_all_its_phases_has_no_memory_of_its_own(tmp_path: Path) -> None:
    costs = {"hours": 0.1, "memory_gib_per_rank": 2.0}
    plan = {"hours": 0.1, "memory_gib_limit": 9.0, "phases": {"sft": costs}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for ran in ([Phase.sft], []):  # by the run itself, and by each resume of it
        found = compare_run_with_plan(tmp_path, {"sft": SFT}, ran)
        assert found["planned"] == {"hours": 0.1, "memory_gib": 2.0}
        assert list(found["measured"]) == ["hours"]
        summary_table({"objective": -2.0, "phases": {"sft": SFT}, "versions": {}, **found}, "")


def test_memory_is_that_of_the_phases_that_the_run_trained(tmp_path: Path) -> None:
    own = {"seconds": 7.0, "measured": {"memory_gib": 1.5}}
    found = compare_run_with_plan(tmp_path, {"sft": SFT, "reward": own}, [Phase.reward])
    assert found["measured"]["memory_gib"] == 1.5
