"""The table of metrics is what runs log: no name too many, and none too few."""

from pathlib import Path

import pytest

from rlhf.base.stored_files import METRICS as METRICS_FILE
from rlhf.config.choices import Phase
from rlhf.config.freeze import load_run
from rlhf.run.metric_table import METRICS, documented_name
from rlhf.run.results import read_phase_result
from rlhf.runtime.start_checks import held_out_metric_names, logged_metric_names, result_names

pytestmark = pytest.mark.slow

# Logged by DeepSpeed's Hybrid Engine only, which needs a GPU (tests/options/hybrid_engine).
ON_GPUS = {"rollout/accelerated_layers"}
# Logged by ppo.critic_check, except for what a run as small as these cannot tell
# (tests/lab/branches/test_critic_states.py, tests/lab/branches/test_critic_check.py).
MEASURES = ("error", "bias", "explained_variance", "slope", "ranking")
OF_CHECKS = {"time/critic_check_seconds", *(f"ppo/critic_{measure}" for measure in MEASURES)}

# Logged by losses of single responses (tests/phases/test_fixed_examples.py).
OF_SINGLE_RESPONSES = {"reward/responses_per_second"}


def names(run_dir: Path) -> set[str]:
    lines = METRICS_FILE.read_lines(run_dir)
    return {name for line in lines for name in line} - {"phase", "step"}


def test_runs_log_every_name_of_the_table_and_no_other(
    option_run: Path, dpo_run: Path, episode_run: Path
) -> None:
    found = names(option_run) | names(dpo_run) | names(episode_run)
    logged = {documented_name(name) for name in found}
    assert logged | ON_GPUS | OF_CHECKS | OF_SINGLE_RESPONSES == set(METRICS)


def test_names_that_searches_and_checkpoints_may_use_are_those_of_a_run(option_run: Path) -> None:
    config = load_run(option_run)
    for phase in (Phase.sft, Phase.reward, Phase.ppo):
        result = read_phase_result(option_run, phase) or {}
        numbers = {f"{phase}.{n}" for n, v in result.items() if isinstance(v, int | float)}
        assert numbers <= set(result_names(config))
    found = names(option_run)
    assert {n for n in found if n.startswith("ppo/eval_")} == {
        *held_out_metric_names(config, Phase.ppo)
    }
    logged = {n for n in found if n.partition("/")[0] in ("sft", "reward", "ppo")}
    assert {n for n in logged if "one_item" not in n} <= set(logged_metric_names(config))
