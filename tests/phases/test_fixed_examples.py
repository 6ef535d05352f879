"""SFT and the reward model learn the mean they should, however a step is cut and padded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.algorithms.reward import end_loss
from rlhf.base.random_streams import seed_for
from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from rlhf.data.collate import divide_pairs_into_steps
from rlhf.data.records import Record
from rlhf.data.splits import PhaseData
from rlhf.phases import reward, sft
from rlhf.phases.shared.context import RunContext, phase_tokens
from rlhf.phases.shared.supervised import warn_if_lr_never_peaks
from rlhf.run.metric_table import varies_between_runs
from tests.phases.run_pieces import EVAL, TRAIN, Compose, PlannedEngine, run_context


class StillEngine(PlannedEngine):
    """Never changes a weight; notes the widths of its batches."""

    def __init__(self, module: nn.Module, **how: Any) -> None:
        super().__init__(module, **how)
        self.lr = 0.0
        self.widths: list[int] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.widths.append(args[0].shape[1])
        return super().__call__(*args, **kwargs)

    def gradient(self) -> Tensor:
        """The sum over all steps."""
        steps = [torch.cat([g.flatten() for g in step.values()]) for step in self.gradients]
        return torch.stack(steps).sum(dim=0)


Run = Callable[..., SimpleNamespace]


@pytest.fixture
def run(compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a phase on ``TRAIN`` with overrides; tells its engine, logs and result."""

    def ran(
        runner: Callable[[RunContext], Any],
        *overrides: str,
        train: list[Record] = TRAIN,
        held_out: list[Record] = EVAL,
    ) -> SimpleNamespace:
        engines: list[StillEngine] = []

        def build(module: nn.Module, **how: Any) -> StillEngine:
            engines.append(StillEngine(module, **how))
            return engines[-1]

        context, notes = run_context(compose, tmp_path, monkeypatch, *overrides)
        for module in (sft, reward):
            monkeypatch.setattr(module, "build_engine", build)
        context = replace(context, parts=dict.fromkeys(context.parts, PhaseData(train, held_out)))
        result = runner(context)
        (engine,) = engines
        return SimpleNamespace(engine=engine, logged=notes.logged, result=result, context=context)

    return ran


def gradient_of(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def reference_gradient(ran: SimpleNamespace, *, batch_size: int, epochs: float) -> Tensor:
    """Of each step the mean over prompts of the mean loss of their pairs, one by one."""
    data = phase_tokens(ran.context, Phase.reward).train
    module = ran.engine.module
    module.zero_grad()

    def score(ids: list[int]) -> Tensor:
        return module(torch.tensor([ids]))[:, -1]

    steps = divide_pairs_into_steps(
        data["group"][:],
        batch_size=batch_size,
        epochs=epochs,
        seed=seed_for(ran.context.config.seed, "reward", "shuffle"),
    )
    for step in steps:
        prompts: dict[int, list[Tensor]] = {}
        rows = [row for row, weight in zip(step.rows, step.weights, strict=True) if weight]
        assert len(rows) < batch_size, "a slot is filled up"
        for row in rows:
            pair = data[row]
            loss = end_loss(score(pair["chosen_ids"]), score(pair["rejected_ids"]))
            prompts.setdefault(pair["group"], []).append(loss)
        means = [  # a small epoch ends within a step: a prompt may be there twice
            torch.stack(losses).mean()
            for group, losses in prompts.items()
            for _ in range(len(losses) // data["group"][:].count(group))
        ]
        torch.stack(means).mean().backward()
    return gradient_of(module)


@pytest.mark.slow
@pytest.mark.parametrize(("micro", "buckets"), [(2, True), (10, False)])
def test_each_prompt_weighs_one_in_the_reward_loss(run: Run, *, micro: int, buckets: bool) -> None:
    batch = ["phase=reward", "reward.loss=end", "reward.epochs=1"]
    batch += ["reward.batch_size=10", f"reward.micro_batch_size={micro}"]
    ran = run(reward.run_reward, *batch, f"data.bucket_by_length={buckets}")
    assert ran.engine.micro_steps == 10 // micro * ran.result["steps"]
    got = ran.engine.gradient()
    expected = reference_gradient(ran, batch_size=10, epochs=1)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-4)


def graded(records: list[Record]) -> list[Record]:
    """Two single responses of each pair: one with a score, one with a mark."""
    return [
        each._replace(rejected=None, **how)
        for number, each in enumerate(records)
        for how in ({"grade": 0.5 * number}, {"chosen": each.rejected, "grade": number % 2 == 0})
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "micro", "buckets"), [("classification", 2, True), ("regression", 8, False)]
)
def test_each_response_weighs_one_in_the_losses_of_grades(
    run: Run, *, loss: str, micro: int, buckets: bool
) -> None:
    batch = ["phase=reward", f"reward.loss={loss}", "reward.epochs=1", "data=local"]
    batch += ["reward.batch_size=8", f"reward.micro_batch_size={micro}", "data.path=x.jsonl"]
    records = {"train": TRAIN, "held_out": EVAL}
    if loss == "regression":
        records = {side: graded(each) for side, each in records.items()}
    ran = run(reward.run_reward, *batch, f"data.bucket_by_length={buckets}", **records)
    assert ran.result["steps"] == 3  # 24 responses
    got = ran.engine.gradient()
    module, slow = ran.engine.module, []
    module.zero_grad()
    for row in phase_tokens(ran.context, Phase.reward).train:
        score = module(torch.tensor([row["ids"]]))[0, -1]
        if loss == "regression":
            slow.append((score - row["grade"]) ** 2)
        else:
            chance = torch.sigmoid(score if row["grade"] else -score)
            slow.append(-chance.log())
    (torch.stack(slow).sum() / 8).backward()  # no weight moved: the sum over three steps
    torch.testing.assert_close(got, gradient_of(module), atol=1e-6, rtol=1e-4)
    steps = [values["reward/loss"] for _, values in ran.logged if "reward/loss" in values]
    assert sum(steps) / 3 == pytest.approx(float(torch.stack(slow).detach().mean()), rel=1e-4)
    assert ran.result["responses"] == 8
    logged = {name for _, values in ran.logged for name in values}
    assert ("reward/eval_chosen_score" in logged) == (loss == "classification")
    assert {"reward/eval_accuracy", "reward/eval_loss", "reward/responses_per_second"} <= logged
    assert not logged & {"reward/pairs_per_second", "reward/eval_calibration_error"}


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_a_phase_shorter_than_its_warm_up_is_told(steps: int, compose: Compose) -> None:
    config = to_run_config(compose(["phase=sft", "sft.warmup_steps=3", "sft.lr=2e-5"]))
    said: list[str] = []
    console: Any = SimpleNamespace(say=said.append)
    warn_if_lr_never_peaks(console, "sft", config.sft, steps=steps)
    if steps == 4:
        assert said == []
    else:
        (line,) = said
        assert line.startswith(f"warning: sft takes {steps} steps with sft.warmup_steps=3: ")
        assert "never reaches sft.lr=2e-05. Give the phase more examples (data.split)" in line


def test_buckets_change_the_padding_alone(run: Run) -> None:
    batch = ["sft.batch_size=8", "sft.micro_batch_size=2", "sft.epochs=1"]
    plain, sorted_ = (
        run(sft.run_sft, "phase=sft", *batch, f"data.bucket_by_length={buckets}")
        for buckets in (False, True)
    )
    assert sum(sorted_.engine.widths) < sum(plain.engine.widths)
    torch.testing.assert_close(
        sorted_.engine.gradient(), plain.engine.gradient(), atol=1e-6, rtol=1e-4
    )
    for (step, values), (other, others) in zip(sorted_.logged, plain.logged, strict=True):
        assert step == other
        names = [name for name in values if not varies_between_runs(name)]
        assert [values[n] for n in names] == pytest.approx([others[n] for n in names], rel=1e-5)


@pytest.mark.parametrize(
    ("every", "sft_steps", "reward_steps"), [(0, [0, 3], [3]), (2, [0, 2, 3], [0, 2, 3])]
)
def test_evaluations_come_when_they_should(
    run: Run, every: int, sft_steps: list[int], reward_steps: list[int]
) -> None:
    overrides = ["sft.batch_size=4", "reward.batch_size=4", "reward.group_pairs=false"]
    overrides += [f"sft.eval_every={every}", f"reward.eval_every={every}"]
    overrides += ["sft.epochs=1", "reward.epochs=1"]
    for runner, order, expected in (
        (sft.run_sft, "sft", sft_steps),
        (reward.run_reward, "reward", reward_steps),
    ):
        ran = run(runner, f"phase={order}", *overrides)
        logged = [(step, v) for step, v in ran.logged if f"{order}/eval_loss" in v]
        assert [step for step, _ in logged] == expected
        assert [step for step, v in ran.logged if f"{order}/loss" in v] == [1, 2, 3]
        assert len({values[f"{order}/eval_loss"] for _, values in logged}) == 1, "no weight moved"


@pytest.mark.parametrize("init", ["random", "sft"])
def test_the_reward_model_has_its_own_dropout(run: Run, init: str) -> None:
    overrides = ["phase=reward", "reward_model.dropout=0.25", "model.dropout=0.5"]
    overrides += [f"reward_model.init={init}", "reward_model.path=null"]
    shape = "model_type:gpt_neox,hidden_size:8,intermediate_size:8,num_hidden_layers:1"
    shape = f"+reward_model.architecture={{{shape},num_attention_heads:1}}"
    overrides += ["reward_model.vocab_size=300", shape] if init == "random" else []
    ran = run(reward.run_reward, *overrides, "reward.batch_size=8", "reward.epochs=1")
    assert ran.engine.module.pretrained.config.attention_dropout == 0.25
