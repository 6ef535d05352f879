"""The recipes on a real pretrained chat model, in a short version.

They need SmolLM2-135M-Instruct as a Hugging Face folder: RLHF_SMOLLM2=FOLDER.
"""

import json
import os
from pathlib import Path

import pytest

from tests.runs import ROOT, launch, python

FOLDER = os.environ.get("RLHF_SMOLLM2", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not FOLDER, reason="RLHF_SMOLLM2 names no folder with SmolLM2-135M-Instruct"
    ),
]
PPO = ["ppo.steps=2", "ppo.rollout_batch_size=8", "ppo.mini_batch_size=8", "ppo.eval_prompts=8"]
FEW = ["data.path=samples:english", "data.split=[1,1,2]", "sft.batch_size=2", "reward.batch_size=2"]


@pytest.mark.parametrize(
    ("experiment", "overrides"),
    [("smollm2_rule", ["data.size=320"]), ("smollm2_hh", FEW), ("smollm2_hh", [*FEW, "lora=all"])],
)
def test_a_short_run(experiment: str, overrides: list[str], tmp_path: Path) -> None:
    run = launch(
        f"experiment={experiment}",
        f"model.path={FOLDER}",
        *PPO,
        *overrides,
        f"run_dir={tmp_path / 'run'}",
        cwd=tmp_path,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    phases = json.loads((tmp_path / "run" / "result.json").read_text())["phases"]
    # Two examples a step teach adapters, which start at nothing, less than bf16 rounds.
    most = 1.01 if "lora=all" in overrides else 1.0
    assert phases["sft"]["perplexity_after"] < most * phases["sft"]["perplexity_before"]
    assert phases["ppo"]["ended_share_after"] > 0
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert all(json.loads(sample)["response"].strip() for sample in samples)


def test_a_short_run_on_sentiment(tmp_path: Path) -> None:
    pytest.importorskip("afinn")
    pytest.importorskip("vaderSentiment")
    assert python(ROOT / "examples" / "sentiment.py", cwd=tmp_path).returncode == 0
    words = ["experiment=smollm2_sentiment", f"model.path={FOLDER}", *PPO]
    path = os.pathsep.join([str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
    run = launch(*words, f"run_dir={tmp_path / 'run'}", cwd=tmp_path, PYTHONPATH=path, timeout=600)
    assert run.returncode == 0, run.stderr
    ppo = json.loads((tmp_path / "run" / "result.json").read_text())["phases"]["ppo"]
    assert ppo["judge_gains"].keys() == {"afinn", "distinct"}
    assert ppo["score_after"] == pytest.approx(ppo["score_parts_after"]["vader"])
