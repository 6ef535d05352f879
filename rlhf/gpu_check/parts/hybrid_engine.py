"""Check that DeepSpeed's Hybrid Engine runs here and agrees with the model's own layers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

from rlhf.base.errors import USER_ERROR
from rlhf.gpu_check.rows import CheckSetting, Finding, Task, checked_finding, skipped_finding
from rlhf.gpu_check.runs import SIDE_BY_SIDE, EndedRun, run_to_end

EXPECTED = "yes with parity, or no with the reason"


def tasks(setting: CheckSetting) -> Iterator[Task]:
    """Yield a task for each ZeRO stage with which DeepSpeed-Chat uses the Hybrid Engine.

    If the first run is refused, the second would be too, for the same reason.
    """
    for stage in (2, 3):
        words = setting.folder / f"stage{stage}", "HYBRID_ENGINE", f"zero=stage{stage}"
        ended = SIDE_BY_SIDE.submit(run_to_end, *words)
        yield Task(f"stage {stage}", partial(_describe_run, ended))
        if ended.exception() is None and ended.result().code == USER_ERROR:
            return


def _describe_run(run: Future[EndedRun]) -> Finding:
    ended = run.result()
    if ended.code == USER_ERROR:
        return skipped_finding(f"no: {ended.last_line}", EXPECTED)
    steps = ended.result["phases"]["ppo"]["steps"]
    figure = f"yes: tokens and log-probs agree with the model's, {steps} PPO steps"
    return checked_finding(True, figure, EXPECTED)
