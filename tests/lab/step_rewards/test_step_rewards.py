"""Rewards of steps: which texts are scored, and at which tokens the rewards are, against a loop."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf.base.ranks import Ranks
from rlhf.base.types import PromptBatch, Responses, Rollout
from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import AnyRewardKind, RewardTerm
from rlhf.data.synthetic_pairs import GoldJudge
from rlhf.models.tokenizers import train_tokenizer
from rlhf.phases.ppo.reward_mix import RewardMix
from rlhf.phases.ppo.targets import TargetMaker
from rlhf.rewards.rules import Answers
from rlhf_lab.step_rewards.step_scores import StepScorer, find_step_ends
from tests.phases.ppo.ppo_pieces import engine_config

TOKENIZER = train_tokenizer(["ab\nab\n\n\nab über a\nü\n\n"] * 9, vocab_size=275)
MODULE = """
def score(prompts, responses, n):
    return [worth(*each) for each in zip(prompts, responses, n, strict=True)]

def worth(prompt, step, n):
    if "bbb" in step:
        return float("nan")
    return 0.3 * len(step) - 0.1 * len(prompt) + 0.2 * n
"""
WEIGHT, FALLBACK, CLIP, KL_CTL, ROWS, WIDTH = 0.5, -2.0, 1.0, 0.1, 8, 24


@pytest.mark.parametrize(
    ("text", "pattern", "steps"),
    [
        ("one\ntwo", r"\n", ["one\n", "two"]),
        ("one\ntwo\n", r"\n", ["one\n", "two\n"]),
        ("\n\none", r"\n", ["\n", "\n", "one"]),
        ("", r"\n", [""]),
        ("no end", r"\n", ["no end"]),
        ("Step 1: a Step 2: b", "(?=Step )", ["Step 1: a ", "Step 2: b"]),
        ("a.  b!c", r"[.!]\s*", ["a.  ", "b!", "c"]),
    ],
)
def test_steps_by_hand(text: str, pattern: str, steps: list[str]) -> None:
    ends = find_step_ends(text, re.compile(pattern))
    assert [text[a:b] for a, b in zip([0, *ends], ends, strict=False)] == steps


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardMix]:
    """A mix of a reward of steps and one of whole responses."""
    folder = tmp_path_factory.mktemp("stepwise")
    (folder / "stepwise.py").write_text(MODULE)
    work = RewardTerm(
        kind=AnyRewardKind("steps"),
        function="stepwise:score",
        pattern=r"\n",
        columns=["n"],
        weight=WEIGHT,
        fallback=FALLBACK,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
        patch.chdir(folder)
        parts = {"work": work, "ends": RewardTerm(kind=RewardKind.stop, weight=3.0)}
        built = RewardMix(parts, TOKENIZER, GoldJudge(), lambda _: None)
    yield built
    built.close()


def slow_rewards(prompt: str, ids: list[int], n: int) -> tuple[list[float], float, int]:
    """A response's rewards of tokens before weight and clip, its score and its number of steps."""
    written = [TOKENIZER.decode(ids[:k], skip_special_tokens=True) for k in range(len(ids) + 1)]
    rewards, step, total, count, space = [0.0] * len(ids), "", 0.0, 0, {}
    exec(MODULE, space)
    for place, letter in enumerate(written[-1], 1):
        step += letter
        is_last = place == len(written[-1])
        if letter == "\n" or is_last:
            found = space["worth"](prompt, step, n)
            token = next(k for k in range(len(ids)) if len(written[k + 1]) >= place)
            rewards[-1 if is_last else token] += found
            prompt, step, total, count = prompt + step, "", total + found, count + 1
    if not written[-1]:
        rewards[-1] = total = space["worth"](prompt, "", n)
        count = 1
    if math.isnan(total):
        return [*[0.0] * (len(ids) - 1), FALLBACK], FALLBACK, count
    return rewards, total, count


@pytest.mark.parametrize("seed", range(8))
def test_rewards_are_at_the_tokens_that_complete_the_steps(mix: RewardMix, seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    letters, sizes = "abü \n\n\n\n", [draw.randint(0, WIDTH // 2) for _ in range(ROWS)]
    texts = ["".join(draw.choices(letters, k=size)) for size in sizes]
    ended = [draw.random() < 0.5 or not text for text in texts]
    rows = [
        [TOKENIZER.pad_token_id, *TOKENIZER.encode(text)] + [TOKENIZER.eos_token_id] * has_ended
        for text, has_ended in zip(texts, ended, strict=True)
    ]
    ids_BT = torch.tensor([ids + [0] * (WIDTH - len(ids)) for ids in rows])
    keep_BT = torch.arange(WIDTH) < torch.tensor(list(map(len, rows)))[:, None]
    responses = Responses(ids_BT, keep_BT, torch.tensor(ended))
    columns, asked = [{"n": n} for n in range(ROWS)], ["?" * n for n in range(ROWS)]
    prompts = PromptBatch(ids_BT, keep_BT, torch.zeros(ROWS, 1), asked, columns)
    scores_B, parts = mix(prompts, responses, torch.zeros(ROWS))
    logprobs_BT, other_BT = torch.randn(2, ROWS, WIDTH, generator=generator)
    zeros_BT = torch.zeros(ROWS, WIDTH)
    rollout = Rollout(prompts, responses, logprobs_BT, other_BT, zeros_BT, scores_B, parts=parts)
    ppo = replace(engine_config().ppo, clip_reward_value=CLIP, missing_end_penalty=0.7)
    made = TargetMaker(ppo, Ranks(), mix.parts).make(rollout, kl_ctl=KL_CTL)

    for row, ids in enumerate(rows):
        rewards, score, count = slow_rewards(asked[row], ids, row)
        assert parts.scores_BK[row, 0].item() == pytest.approx(score, abs=1e-5)
        assert scores_B[row].item() == pytest.approx(WEIGHT * score + 3 * ended[row], abs=1e-5)
        assert parts.criteria["work.steps"][row] == count
        end = min(CLIP, 3.0 * ended[row]) - 0.7 * (not ended[row])
        clipped = [max(-CLIP, min(CLIP, WEIGHT * each)) for each in rewards]
        assert made.scores_B[row].item() == pytest.approx(end + sum(clipped), abs=1e-5)
        kl = (logprobs_BT - other_BT)[row].tolist()
        expected = [each - KL_CTL * k for each, k in zip(clipped, kl, strict=False)]
        expected[-1] += end
        assert made.rewards_BT[row, : len(ids)].tolist() == pytest.approx(expected, abs=1e-5)
        assert not made.rewards_BT[row, len(ids) :].any()


@pytest.mark.parametrize(
    ("result", "scores"),
    [
        ("[1.0] * (len(responses) - 1)", "it returned 2 scores for 3 steps"),
        ("[1.0] * (len(responses) + 1)", "it returned 4 scores for 3 steps"),
        ("[1e16, -1e16, 1.0]", "nan"),
        ("[float('inf'), float('-inf'), 1.0]", "nan"),
    ],
)
def test_a_function_must_score_every_step(
    result: str, scores: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(f"def f(prompts, responses):\n    return {result}\n")
    monkeypatch.syspath_prepend(tmp_path)
    part = RewardTerm(kind=AnyRewardKind("steps"), function=f"{name}:f", pattern=r"\n")
    score, criteria = StepScorer().build(part, tmp_path)
    assert criteria == ["steps"]
    answers = Answers(["?", "?"], ["a\nb", "c"], [True] * 2, [3, 1], {})
    if scores == "nan":
        assert [math.isnan(each) for each in score(answers).scores] == [True, False]
    else:
        with pytest.raises(Exception, match=scores):
            score(answers)
