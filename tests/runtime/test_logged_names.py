"""The table of metrics is what runs log: no name too many, and none too few."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf.run.metric_table import METRICS, documented_name
from tests.runs import EPISODES, finished

pytestmark = pytest.mark.slow

# Options of PPO that log more than the default run does.
OPTIONS = [
    "ppo.kl_placement=loss",
    "ppo.kl_estimator=k3",
    "ppo.dual_clip=3.0",
    "ppo.lr_guard_kl=1.0",
    "ppo.ptx_coef=0.5",
    "ppo.eval_every=1",
    "reward.members=2",
    "ppo.rollout_correction=token",
    "ppo.advantage_estimator=grpo",  # the episodes have a critic
    "ppo.responses_per_prompt=2",
    "ppo.resampling_rounds=1",
    "rewards={model: {kind: model}, ends: {kind: stop, weight: 0.1}}",
]
# Logged by DeepSpeed's Hybrid Engine only, which needs a GPU (tests/options/hybrid_engine).
ON_GPUS = {"rollout/accelerated_layers"}
# Logged by ppo.critic_check, except for what a run as small as these cannot tell
# (tests/options/branches/test_critic_states.py, tests/options/branches/test_critic_check.py).
MEASURES = ("error", "bias", "explained_variance", "slope", "ranking")
OF_CHECKS = {"time/critic_check_seconds", *(f"ppo/critic_{measure}" for measure in MEASURES)}


def names(run_dir: Path) -> set[str]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {name for line in lines for name in line} - {"phase", "step"}


def test_runs_log_every_name_of_the_table_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n\n".join(f"text number {n}" for n in range(60)))
    corpus = f"data.ptx_path={tmp_path / 'corpus.txt'}"
    pipeline = finished(tmp_path / "pipeline", *OPTIONS, corpus)
    dpo = finished(tmp_path / "dpo", "phase=pipeline_dpo")
    episodes = finished(tmp_path / "episodes", *EPISODES, "ppo.eval_every=1")
    found = names(pipeline) | names(dpo) | names(episodes)
    logged = {documented_name(name) for name in found}
    assert logged | ON_GPUS | OF_CHECKS == set(METRICS)
