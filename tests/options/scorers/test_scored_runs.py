"""PPO learns from a scorer with another tokenizer than the actor's, and what runs say of it."""

import json
from pathlib import Path

import pytest

from tests.options.scorers.scorer_folders import train_scorer
from tests.runs import finished

pytestmark = pytest.mark.slow

LEARN = ["phase=pipeline_rule", "ppo.steps=30", "ppo.kl_ctl=0", "ppo.actor_lr=0.02"]
LEARN += ["ppo.advantage_estimator=grpo", "ppo.responses_per_prompt=4"]
LEARN += ["ppo.rollout_batch_size=32", "ppo.mini_batch_size=32", "data.size=2000"]
JUDGE = "vowels: {kind: function, function: 'my_rewards:share', run_code: true, weight: 0}"
SHARE = """
def share(prompts, responses):
    return [sum(each in "aeiou" for each in text) / max(1, len(text)) for text in responses]
"""


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train_scorer(folder := tmp_path_factory.mktemp("scorer"))
    return folder


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 3))])
def test_ppo_learns_from_a_scorer_with_another_tokenizer(
    seed: int, scorer: Path, tmp_path: Path
) -> None:
    """A judge, which PPO does not see, counts what the scorer has learned to like."""
    (tmp_path / "my_rewards.py").write_text(SHARE)
    rewards = f"rewards={{like: {{kind: scorer, path: {scorer}}}, {JUDGE}}}"
    run = finished(tmp_path / "run", *LEARN, f"seed={seed}", "ppo.eval_prompts=64", rewards)
    result = json.loads((run / "result.json").read_text())["phases"]["ppo"]
    before, after = (result[f"score_parts_{when}"] for when in ("before", "after"))
    assert after["vowels"] > before["vowels"] + 0.1
    assert result["score_after"] == after["like"] > before["like"] + 0.1
    assert result["judge_gains"]["vowels"][0] > 0
