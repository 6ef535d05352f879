"""Check that DeepSpeed's Hybrid Engine runs here and agrees with the model's own layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rlhf.gpu_check.rows import CheckSetting, Finding, Task, checked_finding, skipped_finding
from rlhf.gpu_check.runs import TINY_RUN, USER_ERROR, start_run

EXPECTED = "yes with parity, or no with the reason"
# The kernels require a head size of 64. A run compares them with the model before it uses them.
LLAMA = (
    *("model=llama3.2_1b", "model.init=random", "model.path=null", "model.vocab_size=400"),
    *("model.architecture.vocab_size=400", "model.architecture.hidden_size=256"),
    *("model.architecture.intermediate_size=512", "model.architecture.num_hidden_layers=2"),
    *("model.architecture.num_attention_heads=4", "model.architecture.num_key_value_heads=4"),
    *("phase.order=[sft,ppo]", "model@reward_model=gold"),
    *("hardware=auto", "rollout=hybrid_engine", "rollout.max_response_tokens=16"),
)


def tasks(setting: CheckSetting) -> Iterator[Task]:
    """Yield a task for each ZeRO stage with which DeepSpeed-Chat uses the engine."""
    for stage in (2, 3):
        yield Task(f"stage {stage}", partial(_try_zero_stage, setting, stage))


def _try_zero_stage(setting: CheckSetting, stage: int) -> Finding:
    ended = start_run(setting.folder / f"stage{stage}", *TINY_RUN, *LLAMA, f"zero=stage{stage}")
    if ended.code == USER_ERROR:
        return skipped_finding(f"no: {ended.last_line}", EXPECTED)
    steps = ended.result["phases"]["ppo"]["steps"]
    figure = f"yes: tokens and log-probs agree with the model's, {steps} PPO steps"
    return checked_finding(True, figure, EXPECTED)
