"""A teacher reads a prompt of its own: its log-probs, and what they do to the advantages.

tests/runtime/test_resume.py resumes a run with such a teacher that moves;
benchmarks/papers/self_distillation.py is a run that learns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.base.errors import DataError
from rlhf.base.ranks import Ranks
from rlhf.base.types import Rollout
from rlhf.config.choices import Phase
from rlhf.config.typed import to_run_config
from rlhf.data.records import Record
from rlhf.data.splits import PhaseData
from rlhf.models.model_uses import costs_of_methods
from rlhf.models.tokenizers import train_tokenizer
from rlhf.phases.ppo.hooks import build_hooks
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.targets import TargetMaker
from rlhf.runtime.run_data import read_datasets
from rlhf_lab.distillation.hooks import TEACHER_KL, DistillationHook
from tests.algorithms.padded_batches import normal, with_garbage
from tests.conftest import Compose
from tests.phases.ppo.ppo_pieces import LENGTHS, ROWS, TEMPERATURE, separate_engine, some_rollout
from tests.runs import launch

ON = "ppo.teacher_prompt_column=answer"
BY_ACTOR = ["model@reward_model=gold", "ppo.advantage_estimator=reinforce_pp", "lora=default"]
TEACHER_PROMPTS = ["a hint", "?", "a longer hint than all others", "hints"]


def prompted_rollout(columns: list[Mapping[str, Any]]) -> Rollout:
    rollout = some_rollout()
    return rollout._replace(prompts=rollout.prompts._replace(columns=columns))


def test_the_teacher_is_the_reference_behind_its_own_prompts(compose: Compose) -> None:
    """Log-probs of each row alone, unpadded and in fp64, and their sums over the response."""
    config = to_run_config(compose([ON, "data.template=plain"]))
    engine = separate_engine()
    (hook,) = (trainer := PPOTrainer(engine, config.ppo, build_hooks(config))).hooks
    rollout = prompted_rollout([{"answer": text} for text in TEACHER_PROMPTS])
    found = hook.annotate_scored_rollout(trainer, rollout)
    reference = engine.models.reference.module.pretrained.double()
    for row, (prompt, length) in enumerate(zip(TEACHER_PROMPTS, LENGTHS, strict=True)):
        before = engine.tokenizer(prompt).input_ids
        ids = torch.cat([torch.tensor(before), rollout.responses.ids_BT[row, :length]])
        with torch.no_grad():
            logits_SV = reference(ids[None]).logits[0, len(before) - 1 : -1] / TEMPERATURE
        expected_T = logits_SV.log_softmax(-1).gather(1, ids[len(before) :, None])[:, 0]
        expected_T = rollout.logprobs_BT[row, :length] - expected_T
        kl_T = found.extras[TEACHER_KL][row].double()
        torch.testing.assert_close(kl_T[:length], expected_T, atol=1e-5, rtol=1e-5)
        assert not kl_T[length:].any()
        total = float(found.measures["teacher_kl"][row])
        assert total == pytest.approx(float(expected_T.sum()), abs=1e-4)
    assert found.reference_logprobs_BT is rollout.reference_logprobs_BT


@pytest.mark.parametrize(
    "words",
    [
        ["ppo.kl_ctl=0.3"],  # whitened, with the penalty of the plain reference in the rewards
        ["ppo.kl_placement=advantage", "ppo.advantage_estimator=reinforce_pp"],
        ["ppo.advantage_estimator=grpo", "ppo.responses_per_prompt=2"],
        ["ppo.rollout_correction=token"],  # weighs the teacher's part too
    ],
)
def test_each_token_pays_for_its_own_kl_to_the_teacher(compose: Compose, words: list[str]) -> None:
    plain = some_rollout()
    keep_BT = plain.responses.keep_BT
    kl_BT = normal(ROWS, 5, seed=9).masked_fill(~keep_BT, 0.0)
    sampled_BT = plain.logprobs_BT + 0.3 * normal(ROWS, 5, seed=8)
    rollout = plain._replace(
        logprobs_BT=with_garbage(plain.logprobs_BT, keep_BT, 7.0),
        responses=plain.responses._replace(logprobs_BT=sampled_BT),
    )

    def advantages_of(*more: str, extras: Mapping[str, Any]) -> torch.Tensor:
        config = to_run_config(compose([*words, *more]))
        maker = TargetMaker(config.ppo, Ranks(), hooks=build_hooks(config))
        made = maker.make(rollout._replace(extras=extras), kl_ctl=config.ppo.kl_ctl)
        return made.advantages.advantages_BT

    without_BT = advantages_of(extras={})
    assert advantages_of(ON, extras={}).equal(without_BT), "a held-out rollout"
    found_BT = advantages_of(ON, "ppo.teacher_coef=0.7", extras={TEACHER_KL: kl_BT})
    corrected = "ppo.rollout_correction=token" in words
    for row in range(ROWS):
        for place in range(5):
            expected = float(without_BT[row, place])
            if keep_BT[row, place]:
                logprob = float(plain.logprobs_BT[row, place])
                ratio = torch.tensor(logprob - float(sampled_BT[row, place])).exp().clamp(max=2.0)
                pull = 0.7 * float(kl_BT[row, place])
                expected -= float(ratio) * pull if corrected else pull
            assert float(found_BT[row, place]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        ([], 3),  # reference, critic and reward model score
        (["ppo.advantage_estimator=reinforce_pp"], 2),
        (["phase=pipeline_rule", "+rewards={ends: {kind: stop}}", *BY_ACTOR], 1),
    ],
)
def test_plans_count_a_further_pass(words: list[str], passes: int, compose: Compose) -> None:
    config = to_run_config(compose([ON, "model=opt_125m", *words]))
    (costs,) = costs_of_methods(config)
    assert costs.added_step_seconds(config, Phase.ppo, 9.0, {"score": 6.0}) == {"teach": 6 / passes}
    assert costs.added_step_seconds(config, Phase.sft, 9.0, {"score": 6.0}) == {}


PLAIN = "\n\nHuman: hi\n\nAssistant:"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "None, of 0 tokens"),
        (" ", "' ', of 0 tokens"),
        (["a"], r"..a'., of 0 tokens"),
        ("x" * 65, f"'{'x' * 59}, of 65 tokens"),
    ],
)
def test_rows_without_a_usable_prompt_are_named_before_training(
    value: object, shown: str, compose: Compose, tmp_path: Path
) -> None:
    words = [ON, "rollout.max_prompt_tokens=64", f"data.cache_dir={tmp_path}"]
    config = to_run_config(compose([*words, "data.template=plain"]))
    good = Record(PLAIN, columns={"answer": "x" * 64})
    bad = Record(PLAIN.replace("hi", "ho"), columns={"answer": value})
    too_long = Record(PLAIN * 9, columns={"answer": None})  # a row that PPO skips
    tokenizer = train_tokenizer(["words"], vocab_size=260)

    def context_of(*train: Record) -> Any:
        parts = {Phase.ppo: PhaseData(train, [good])}
        return SimpleNamespace(config=config, tokenizer=tokenizer, parts=parts)

    DistillationHook.check_data(context_of(good, too_long))
    start = r"^ppo.teacher_prompt_column=answer: the row with the prompt '.*Human: ho.*' has "
    with pytest.raises(DataError, match=start + shown + "; must be a text of 1 to .*=64 tokens"):
        DistillationHook.check_data(context_of(good, too_long, bad))


def test_prompts_without_the_column_are_refused(compose: Compose) -> None:
    config = to_run_config(compose([ON, "data.template=plain"]))
    (hook,) = (trainer := PPOTrainer(separate_engine(), config.ppo, build_hooks(config))).hooks
    with pytest.raises(DataError, match="the row with the prompt 'a' has None"):
        hook.annotate_scored_rollout(trainer, some_rollout())


def test_the_column_is_read_with_the_data(compose: Compose, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "a", "hinted": "a b"}\n')
    words = ["data=local", f"data.path={path}", "phase=pipeline_rule", "model@reward_model=gold"]
    words += ["+rewards={ends: {kind: stop}}", "ppo.teacher_prompt_column"]
    (data,) = read_datasets(to_run_config(compose([*words[:-1], f"{words[-1]}=hinted"])), print)
    assert [record.columns for record in data.train] == [{"hinted": "a b"}]
    with pytest.raises(DataError, match=r"'other' is missing; ppo.teacher_prompt_column names"):
        read_datasets(to_run_config(compose([*words[:-1], f"{words[-1]}=other"])), print)


@pytest.mark.slow
def test_a_bad_row_ends_the_run_before_any_training(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    rows = [
        {"prompt": f"a {n}", "completion": "b", "hinted": "" if n == 7 else "c"} for n in range(99)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["experiment=smoke", "phase=pipeline_rule", "model@reward_model=gold", "data=local"]
    words += [f"data.path={path}", "data.split=[1,0,9]", "rewards={ends: {kind: stop}}"]
    words += ["sft.batch_size=4", "ppo.rollout_batch_size=4", "ppo.mini_batch_size=4"]
    run = launch(
        *words, "ppo.teacher_prompt_column=hinted", f"run_dir={tmp_path / 'run'}", cwd=tmp_path
    )
    assert run.returncode == 2, run.stderr
    assert f"{path}, row 8 has ''" in run.stderr
    assert not (tmp_path / "run" / "sft").exists()
