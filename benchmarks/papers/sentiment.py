"""A pretrained model learns positive sentiment from one lexicon; another lexicon judges it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, table

from papers.claims import Figures, NotMeasurableError, Outcome, PaperResult, Place, Verdict
from papers.paired import number
from papers.started_runs import ppo_result, run_of
from rlhf.evaluate.__main__ import evaluate
from rlhf.evaluate.figures import answer_statistics

MODEL = "RLHF_SMOLLM2"  # as in tests/runtime/test_smollm2.py
NEEDS = f"`{MODEL}`: a folder with SmolLM2-135M-Instruct; and `pip install -e '.[sentiment]'`"
PRINTED = 20  # held-out prompts whose answers are kept with the figures
MODELS = {"before": "start", "after": "ppo"}  # names in evaluation/answers.jsonl
VARIETY = 0.8  # of the distinct pairs of words before, what must be left
QUICK = ("ppo.steps=2", "ppo.rollout_batch_size=8", "ppo.mini_batch_size=8", "ppo.eval_prompts=8")


def model_folder() -> Path:
    """Return the folder of the model.

    Raises:
        NotMeasurableError: if the variable names no folder with a model.
    """
    given = os.environ.get(MODEL, "")
    if not Path(given, "config.json").is_file():
        raise NotMeasurableError(f"{MODEL}={given} holds no model. The row needs {NEEDS}")
    return Path(given).resolve()


def measure(seed: int, place: Place) -> Figures:
    """Return scores, judges, KL, length and variety before and after PPO, and twenty answers."""
    folder, examples = model_folder(), ROOT / "examples"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(examples), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, str(examples / "sentiment.py")], cwd=place.folder, check=True)
    run_dir = run_of(
        place._replace(is_quick=False),  # which would take another experiment
        "experiment=smollm2_sentiment",
        f"model.path={folder}",
        f"data.path={place.folder / 'sentiment'}",
        *(QUICK if place.is_quick else ()),
        seed=seed,
    )
    result = ppo_result(run_dir)
    evaluate(run_dir, trusts_run=True)
    text = (run_dir / "evaluation" / "answers.jsonl").read_text(encoding="utf-8")
    rows = [row for row in map(json.loads, text.splitlines()) if row["decoder"] == "sampled"]
    found: Figures = {
        "gain by AFINN, interval": result["judge_gains"]["afinn"],
        "gain by VADER, interval": result["score_gain_ci"],
        "KL": result["kl_after"],
        "answers": printed(rows),
    }
    for when, model in MODELS.items():
        of_model = answer_statistics([row for row in rows if row["model"] == model])
        found |= {f"{name}, {when}": value for name, value in measures(of_model).items()}
    return found


def measures(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return what is compared of the answers of one model."""
    return {
        "VADER": figures["parts/vader"],
        "AFINN": figures["parts/afinn"],
        "distinct long words in an answer": figures["parts/distinct"],
        "distinct pairs of words": figures["distinct_2"],
        "distinct answers": figures["distinct_responses"],
        "tokens": figures["tokens"],
        "share that ended": figures["ended_share"],
    }


def printed(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the answers to the first held-out prompts, before and after, as a table."""
    answers = {(row["model"], row["prompt"]): row["response"] for row in rows}
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))[:PRINTED]
    cells = [
        [
            each.strip().replace("|", "\\|")
            for each in (prompt, *(answers[m, prompt] for m in MODELS.values()))
        ]
        for prompt in prompts
    ]
    return table(["beginning", *MODELS], cells)


def judge(found: Mapping[int, Figures]) -> Verdict:
    """Look at the interval of each seed, and whether the answers have kept their variety."""
    lows, words = [], []
    for seed, figures in found.items():
        interval = figures["gain by AFINN, interval"]
        assert isinstance(interval, list)
        lows.append(interval[0])
        words.append(f"seed {seed} {interval[0]:+.3f} to {interval[1]:+.3f}")
    kept = [
        number(each, "distinct pairs of words, after")
        / number(each, "distinct pairs of words, before")
        for each in found.values()
    ]
    text = f"gain by AFINN: {', '.join(words)}; {min(kept):.2f} of the distinct pairs are left"
    above = sum(low > 0 for low in lows)
    if above == len(RESULT.seeds) and min(kept) >= VARIETY:
        return Verdict(Outcome.PASSED, text)
    failed = len(lows) - above > 1 or min(kept) < VARIETY
    return Verdict(Outcome.FAILED if failed else Outcome.OPEN, text)


RESULT = PaperResult(
    title="Positive sentiment",
    source="Ziegler et al., https://arxiv.org/abs/1909.08593, section 3.1, and trlx's example of "
    "sentiment",
    claim="PPO on a reward for sentiment, with a KL penalty, makes the continuations of a "
    "pretrained language model positive, and they remain language.",
    criterion="experiment=smollm2_sentiment (RLOO; reward: VADER), 192 held-out prompts about "
    "subjects that training does not mention; the judge is AFINN's mean over distinct words. "
    "Passed: the 95 % interval of the judge's gain lies above 0 in each seed, and of the share of "
    "distinct pairs of words at least 0.8 is left. Failed: the interval of two seeds does not lie "
    "above 0, or less is left.",
    seeds=(1, 2, 3),
    minutes=10,
    needs=NEEDS,
    measure=measure,
    judge=judge,
)
