"""Check that DeepSpeed's Hybrid Engine runs here and agrees with the model's own layers."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.gpu_check.rows import CheckSetting, Finding, Task, checked_finding, skipped_finding
from rlhf.gpu_check.runs import SIDE_BY_SIDE, USER_ERROR, run_to_end

EXPECTED = "yes with parity, or no with the reason"


def tasks(setting: CheckSetting) -> Iterator[Task]:
    """Yield a task for each ZeRO stage with which DeepSpeed-Chat uses the Hybrid Engine."""
    found = {n: SIDE_BY_SIDE.submit(_check_hybrid_engine, setting, n) for n in (2, 3)}
    yield from (Task(f"stage {stage}", each.result) for stage, each in found.items())


def _check_hybrid_engine(setting: CheckSetting, stage: int) -> Finding:
    ended = run_to_end(setting.folder / f"stage{stage}", "HYBRID_ENGINE", f"zero=stage{stage}")
    if ended.code == USER_ERROR:
        return skipped_finding(f"no: {ended.last_line}", EXPECTED)
    steps = ended.result["phases"]["ppo"]["steps"]
    figure = f"yes: tokens and log-probs agree with the model's, {steps} PPO steps"
    return checked_finding(True, figure, EXPECTED)
