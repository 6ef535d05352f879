"""The parts of gpu_check judge: what is right passes, and what is wrong fails."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path

import pytest
import torch

from rlhf.config.choices import Dtype
from rlhf.gpu_check import runs
from rlhf.gpu_check.parts import decoders, pipelines, resume
from rlhf.gpu_check.processes import PARTS
from rlhf.gpu_check.rows import CheckSetting, RowVerdict, Size, measure_row
from rlhf.gpu_check.runs import EndedRun
from rlhf.jobs.completion import build_new_config
from rlhf.jobs.launch_command import Job
from rlhf.models.families import FAMILIES
from rlhf.plan.decide import plan_and_configure
from rlhf.rollout.decoders.fused import FusedDecoder
from tests.plan.planned import Compose
from tests.pretend_cuda.gpu import Gpu

HERE = pipelines.Losses(sft=5.7, reward=0.67, score=-0.4, score_std=0.1, responses=16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_that_is_right_passes(gpu: Gpu, dtype: torch.dtype) -> None:
    found = decoders._check_decoder("qwen3", dtype)
    assert found.verdict is RowVerdict.passed
    assert found.numbers["eager_tokens"] == 42
    if dtype is torch.float32:
        assert found.figure.startswith("eager: 42 of 42 tokens, ")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda logits_BV: 1.3 * logits_BV,  # other log-probs
        lambda logits_BV: logits_BV.roll(1, dims=-1),  # other tokens
        lambda logits_BV: torch.full_like(logits_BV, torch.nan).index_fill_(1, sent_0(), 0.0),
    ],
)
def test_a_decoder_that_is_wrong_fails(
    gpu: Gpu, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = FusedDecoder._compute_logits
    monkeypatch.setattr(FusedDecoder, "_compute_logits", lambda self, x: wrong(logits(self, x)))
    row = measure_row(
        decoders.Task("llama", lambda: decoders._check_decoder("llama", torch.bfloat16))
    )
    assert row.verdict is RowVerdict.failed


def sent_0() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.long, device="cuda")


def test_every_fused_family_has_a_model() -> None:
    fused = {name for name, family in FAMILIES.items() if family.block is not None}
    assert fused == {name.partition("-")[0] for name in decoders.MODELS}


@pytest.mark.parametrize(
    "there",
    [
        HERE._replace(sft=5.7 * 1.01),
        HERE._replace(reward=0.67 * 0.99),
        HERE._replace(score=0.0),
        HERE._replace(sft=math.nan),
        HERE._replace(score=math.nan),
    ],
)
def test_losses_that_rounding_does_not_explain(there: pipelines.Losses) -> None:
    assert pipelines.losses_agree(HERE, HERE, 1e-6)
    assert pipelines.losses_agree(HERE._replace(sft=5.703, score=-0.45), HERE, 8e-3)
    assert not pipelines.losses_agree(there, HERE, 8e-3)


def test_runs_cover_engines_stages_precisions_and_offload(gpu: Gpu) -> None:
    names = list(pipelines.overrides_by_run())
    assert {f"DeepSpeed, stage {stage}, bf16" for stage in range(4)} <= set(names)
    assert {"torch, stage 1, fp32", "offload, stage 3, bf16", "DeepSpeed, stage 1, fp16"} <= set(
        names
    )
    assert all(Dtype(name.rpartition(" ")[2]) for name in names)


@pytest.mark.parametrize(
    ("dtype", "engines"),
    [(Dtype.bf16, ["torch, stage 1", "DeepSpeed, stage 2"]), (Dtype.fp16, ["DeepSpeed, stage 2"])],
)
def test_engines_are_resumed_in_the_precision_of_the_gpu(
    dtype: Dtype, engines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "resolve_dtype", lambda *_: dtype)
    setting = CheckSetting(folder=tmp_path, size=Size.full)
    assert [task.what for task in resume.tasks(setting)] == engines


def test_every_part_has_its_module() -> None:
    for part in PARTS:
        assert callable(import_module(f"rlhf.gpu_check.parts.{part.name}").tasks)


@pytest.mark.slow
@pytest.mark.parametrize("part", [part.name for part in PARTS])
def test_launch_options_of_a_part_are_accepted(
    part: str, gpu: Gpu, compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that no phase reads was refused, and five parts measured nothing on a real GPU."""
    started: list[list[str]] = []

    def run_launcher(run_dir: Path, words: list[str]) -> EndedRun:
        started.append(words)
        return EndedRun(run_dir=run_dir, code=1, output="not started", seconds=0.0)

    monkeypatch.setattr(runs, "_run_launcher", run_launcher)
    if part not in ("machine", "kernels", "decoders"):
        setting = CheckSetting(folder=tmp_path, size=Size.full)
        for task in import_module(f"rlhf.gpu_check.parts.{part}").tasks(setting):
            measure_row(task)
        assert started
    for words in started:
        if not any(word.startswith("model.path=/") for word in words):  # that run trains it first
            there = [word.replace("hardware=auto", "hardware=a100_40g") for word in words]
            job = Job(compose([*there, "plan=only"]), there, is_plan=True)
            plan = plan_and_configure(build_new_config(job)).plan
            assert plan is not None
            assert plan.fits, words
