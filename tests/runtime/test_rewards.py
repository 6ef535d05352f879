"""PPO learns from functions, endpoints and mixes, and survives them when they fail."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.endpoint import endpoint
from tests.runs import ROOT, TINY_RUN, finished, launch, metrics

pytestmark = pytest.mark.slow

MODULE = (ROOT / "examples" / "my_rewards.py").read_text()
FUNCTION = "{kind: function, function: 'my_rewards:vowels', run_code: true}"
STEPS = "{kind: steps, function: 'my_rewards:vowels', run_code: true, pattern: '[aeiou]'}"
# Enough steps, and nothing holds them back.
LEARN = ["ppo.steps=14", "ppo.kl_ctl=0", "ppo.actor_lr=0.03"]
LEARN += ["ppo.eval_prompts=8", "ppo.sample_every=99"]
BY_RULE = ["phase=pipeline_rule", *LEARN]
GROUPS = ["ppo.advantage_estimator=grpo", "ppo.responses_per_prompt=4"]


def of_ppo(run_dir: Path, name: str) -> list[float]:
    return [line[name] for line in metrics(run_dir) if name in line]


def gain(scores: list[float]) -> float:
    return sum(scores[-3:]) / 3 - sum(scores[:3]) / 3


@pytest.mark.soak
@pytest.mark.parametrize(
    ("estimator", "more"),
    [
        ("grpo", []),
        ("gae", ["ppo.critic_lr=0.01"]),
        ("rloo", []),
        ("reinforce_pp", []),
        ("grpo", ["ppo.surrogate=dppo_tv", "ppo.cliprange=0.15"]),
        ("gae", ["ppo.surrogate=dppo_kl", "ppo.cliprange=0.05", "ppo.critic_lr=0.01"]),
        ("grpo", ["ppo.off_policy_mask_kl=0.01", "ppo.ppo_epochs=4"]),
        # At first only responses that ended are learned from, and scores fall.
        ("rloo", ["ppo.missing_end_mask=true", "ppo.steps=30", "ppo.actor_lr=0.02"]),
    ],
)
def test_a_function_is_learned_from(estimator: str, more: list[str], tmp_path: Path) -> None:
    """Below a mix is learned from with gae, and an endpoint with grpo."""
    (tmp_path / "my_rewards.py").write_text(MODULE)
    group = [] if estimator == "gae" else ["ppo.responses_per_prompt=4"]
    run = finished(
        tmp_path / "run",
        *BY_RULE,
        f"ppo.advantage_estimator={estimator}",
        *group,
        *more,
        f"rewards.vowels={FUNCTION}",
    )
    scores = of_ppo(run, "ppo/score_mean")
    assert gain(scores) > 0.5
    assert of_ppo(run, "ppo/parts/vowels") == scores
    assert set(of_ppo(run, "ppo/fallback_share")) == {0}
    result = json.loads((run / "result.json").read_text())["phases"]["ppo"]
    assert result["score_parts_after"] == {"vowels": result["score_after"]}


def test_each_reward_is_learned_from_on_its_own_scale(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(MODULE)
    rewards = f"rewards={{vowels: {FUNCTION}, an_e: {{kind: pattern, pattern: e}}}}"
    groups = ["ppo.gdpo=true", "ppo.advantage_estimator=dr_grpo", "ppo.responses_per_prompt=4"]
    stale = ["rollout.lag=1", "ppo.rollout_correction=token", "ppo.rollout_correction_lr=true"]
    run = finished(tmp_path / "run", *BY_RULE, *groups, *stale, rewards)
    scales = of_ppo(run, "ppo/lr_scale")
    assert 0 < min(scales) < 0.95 < scales[0] <= 1, "stale from the second step on"
    for name in ("vowels", "an_e"):
        assert gain(of_ppo(run, f"ppo/parts/{name}")) > 0.2


def test_a_mix_has_the_reward_model_in_it(tiny_run: Path, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(MODULE)
    parts = f"rewards={{learned: {{kind: model, normalise: true}}, vowels: {STEPS}, "
    parts += "brief: {kind: length, most: 4, slack: 4, weight: 0.25}, "
    parts += "right: {kind: exact, columns: [answer], weight: 0}}"
    words = [*LEARN, "ppo.critic_lr=0.01", "ppo.steps=9", "phase=ppo", f"from_run={tiny_run}"]
    run = finished(tmp_path / "run", *words, parts)
    named = [of_ppo(run, f"ppo/parts/{name}") for name in ("learned", "vowels", "brief")]
    for total, learned, vowels, brief in zip(of_ppo(run, "ppo/score_mean"), *named, strict=True):
        assert total == pytest.approx(learned + vowels + 0.25 * brief, abs=1e-5)
    assert gain([sum(each) for each in zip(*named[1:], strict=True)]) > 0.25
    assert (run / "ppo" / "critic" / "model.safetensors").exists()
    assert set(of_ppo(run, "ppo/fallback_share")) == {0}
    result = json.loads((run / "result.json").read_text())["phases"]["ppo"]
    low, high = result["judge_gains"]["right"]  # a judge, which the score leaves out
    before, after = (result[f"score_parts_{when}"]["right"] for when in ("before", "after"))
    assert low <= after - before <= high


def over_http(url: str, **keys: Any) -> str:
    given = {"kind": "http", "url": f"'{url}'", "timeout_seconds": 1, "retries": 0} | keys
    return f"rewards.remote={{{', '.join(f'{key}: {value}' for key, value in given.items())}}}"


def test_an_endpoint_that_fails_costs_its_batches_only(tmp_path: Path) -> None:
    with endpoint() as server:
        server.faults = ["", "", "", "sleep", "500", "nan", "length", "cut", "text"]
        remote = over_http(server.url, fallback=0, weight=0.1)
        run = finished(tmp_path / "run", *BY_RULE, *GROUPS, remote)
    shares = of_ppo(run, "ppo/fallback_share")
    assert max(shares) == 1
    assert shares[-1] == 0
    assert gain(of_ppo(run, "ppo/parts/remote")[-9:]) > 1, "longer responses"


def test_without_a_fallback_a_failure_ends_the_run_before_training(tmp_path: Path) -> None:
    with endpoint() as server:
        server.faults = ["nan"]
        words = [*TINY_RUN, *BY_RULE, over_http(server.url), f"run_dir={tmp_path / 'run'}"]
        run = launch(*words, cwd=tmp_path)
    assert run.returncode == 2
    problem = "failed on the row with the prompt "
    assert f"error: rewards.remote (kind=http) {problem}" in run.stderr
    assert ", before training: it returned NaN" in run.stderr
    assert "rewards.remote.fallback=NUMBER" in run.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert "Traceback" not in run.stderr


def test_a_function_that_does_not_exist_is_refused_before_training(tmp_path: Path) -> None:
    words = [*TINY_RUN, *BY_RULE, f"rewards.vowels={FUNCTION}", f"run_dir={tmp_path / 'run'}"]
    run = launch(*words, cwd=tmp_path)
    assert run.returncode == 2
    assert "rewards.vowels.function=my_rewards:vowels: cannot be imported" in run.stderr
    assert not (tmp_path / "run").exists(), "before torch is imported"
