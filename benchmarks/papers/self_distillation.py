"""Whether a policy that reads the answer in a hint can teach itself to answer without the hint.

The demonstrations of questions have wrong letters; behind a hint they have the hint's letters, of
which some are random, so the SFT model copies hints. PPO then asks plain questions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

from papers import chains
from papers.claims import Figures, PaperResult, Place, Verdict
from papers.crossover import function_reward
from papers.paired import difference, gains, mean_over, told
from papers.started_runs import run_of

STEPS = 32
EARLY = STEPS // 8  # with the teacher, which needs 8 times fewer responses
ROWS = 3000
ENDS = "rewards.learned={kind: stop, weight: 0.1}"  # all responses end: nothing to learn from
TEACHER = "teacher"
GRPO = "GRPO"
REBASED = (
    "The criterion's commit is 48efc009 since a rebase; the commit below is not in the repository, "
    "so that nothing shows which came first."
)
ARMS = {
    TEACHER: ("ppo.teacher_prompt_column=hinted", ENDS),
    "no teacher": (ENDS,),
    "wrong hints": ("ppo.teacher_prompt_column=misled", ENDS),
    GRPO: (function_reward("learned", "papers.chains:whole", weight=1),),
}
SETTINGS = (
    "phase=pipeline_rule",
    "model@reward_model=gold",
    "model.vocab_size=265",  # bytes: each letter is a token
    "data=local",
    "data.path=null",
    "sft.epochs=6",
    f"ppo.steps={STEPS}",
    "ppo.rollout_batch_size=64",
    "ppo.mini_batch_size=32",
    "ppo.advantage_estimator=grpo",
    "ppo.responses_per_prompt=4",
    "ppo.kl_ctl=0",
    "ppo.missing_end_penalty=0",
    f"ppo.eval_every={EARLY}",
    "ppo.eval_prompts=128",
    function_reward("right", "papers.chains:share", weight=0),
)


def write_data(folder: Path, *, horizon: int) -> str:
    """Write demonstrations for SFT and questions for PPO; return the override that reads them."""
    rng = random.Random(1)
    plain = [chains.draw_prompt(rng, horizon=horizon) for _ in range(ROWS)]
    shown = [(each, chains.demonstrate(rng, each, wrong=chains.SHARE_WRONG)) for each in plain]
    for place, each in enumerate(plain):
        hint = chains.right_answer(each) if place % 2 else _random_letters(rng, horizon)
        shown.append((with_hint(each, hint), hint))
    rng.shuffle(shown)
    asked = [chains.draw_prompt(rng, horizon=horizon) for _ in range(ROWS)]
    rows = {
        "demonstrations": [{"prompt": a, "completion": f" {b}"} for a, b in shown],
        "questions": [
            {
                "prompt": each,
                "hinted": with_hint(each, chains.right_answer(each)),
                "misled": with_hint(each, _random_letters(rng, horizon)),
            }
            for each in asked
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, of_file in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in of_file))
    phases = {"demonstrations": "sft", "questions": "ppo"}
    sets = (f"{n}: {{path: {folder / n}.jsonl, phases: [{p}]}}" for n, p in phases.items())
    return f"data.sets={{{', '.join(sets)}}}"


def with_hint(prompt: str, hint: str) -> str:
    """Return the prompt with a hint behind the question."""
    return prompt.replace("\n\nAssistant:", f" hint {hint}\n\nAssistant:")


def _random_letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choices(chains.LETTERS[: chains.SIZE], k=count))


def measure(seed: int, place: Place, *, horizon: int = 8) -> Figures:
    """Return the true score of plain questions along each arm, and the KL to its teacher."""
    sets = write_data(place.shared / f"hints-{horizon}", horizon=horizon)
    words = (*SETTINGS, f"rollout.max_response_tokens={horizon + 4}", sets)
    found: Figures = {}
    for arm, more in ARMS.items():
        run_dir = run_of(place, *words, *more, seed=seed)
        curve = _values(run_dir, "ppo/eval_parts/right")
        found[f"right, {arm}"] = curve
        found[f"right before, {arm}"], found[f"right early, {arm}"] = curve[:2]
        found[f"right after, {arm}"] = curve[-1]
        if kl := _values(run_dir, "ppo/teacher_kl"):
            found[f"teacher KL before, {arm}"], found[f"teacher KL after, {arm}"] = kl[0], kl[-1]
    return found


def _values(run_dir: Path, name: str) -> list[float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def judge(found: Mapping[int, Figures]) -> Verdict:
    """Compare few responses with the teacher and many with GRPO, seed by seed."""
    gain = difference(found, f"right early, {TEACHER}", f"right after, {GRPO}")
    changes = [_change(found, "right", arm) for arm in ARMS]
    words = (
        f"share of right letters after {EARLY} steps with the teacher minus after {STEPS} of GRPO "
        f"{told(gain)}; before and after {STEPS} steps: {', '.join(changes)}; KL to the teacher in "
        f"nats per response: {_change(found, 'teacher KL', TEACHER)}"
    )
    return gains(gain, words)


def _change(found: Mapping[int, Figures], name: str, arm: str) -> str:
    before, after = (mean_over(found, f"{name} {when}, {arm}").mean for when in ("before", "after"))
    return f"{arm} {before:.3f} to {after:.3f}"


RESULT = PaperResult(
    title="Self-distillation from a hint",
    source="Zhao et al., https://arxiv.org/abs/2601.18734v2, abstract",
    claim="A model that teaches itself, with the answer in the teacher's prompt only, is 8 to 12 "
    "times as efficient in tokens as GRPO.",
    criterion="Counting 8 letters after an SFT that learned to copy hints. The share of "
    f"right letters, on held-out questions without hints, after {EARLY} steps of 64 responses with "
    f"the teacher and no other reward, minus after {STEPS} such steps of GRPO, rewarded for whole "
    "right answers, paired by seed. Passed: the interval lies above 0. Failed: it lies below.",
    note="One seed of the first arm was tried before the criterion was written. GRPO needs no more "
    "responses: the likeliest letters are the right ones, so any sharper policy is better. Wrong "
    "hints lead to chance, 0.125: the teacher reads them. The criterion cannot see an efficiency: "
    f"both arms are at a ceiling. After {EARLY} steps the seeds have 0.985 to 0.989 with the "
    "teacher and 0.982 to 0.983 with GRPO, so about the same efficiency. " + REBASED,
    seeds=(1, 2, 3),
    minutes=5,
    measure=measure,
    judge=judge,
)
