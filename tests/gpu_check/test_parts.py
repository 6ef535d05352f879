"""The parts of gpu_check judge: what is right passes, and what is wrong fails."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf.base.errors import RolloutError
from rlhf.config.choices import Device, Dtype
from rlhf.engine.devices import current_ranks
from rlhf.gpu_check import collectives, decoders, memory, pipelines, resume, rollouts, runs
from rlhf.gpu_check.rows import (
    CheckPart,
    RowVerdict,
    Size,
    Task,
    measure_row,
    measured_row,
    read_parts,
)
from rlhf.gpu_check.runs import EndedRun
from rlhf.jobs.completion import build_new_config
from rlhf.jobs.launch_command import Job
from rlhf.models.families import FAMILIES
from rlhf.options.replay.weight_digests import digest_of_slice
from rlhf.options.vllm.vllm_client import VllmClient
from rlhf.plan.plan import plan_and_configure
from rlhf.rollout.decoders.fused import FusedDecoder
from tests.plan.planned import Compose
from tests.pretend_cuda.gpu import Gpu

SFT, REWARD, SCORE, STD = "sft/loss", "reward/loss", "ppo/score_mean", "ppo/score_std"
HERE = {SFT: 5.7, REWARD: 0.67, SCORE: -0.4, STD: 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_that_is_right_passes(gpu: Gpu, dtype: torch.dtype, has_graphs: bool) -> None:
    found = decoders._check_decoder("qwen3", dtype, has_graphs=has_graphs)
    assert found.verdict is RowVerdict.passed
    assert found.numbers["tokens"] == 42
    if dtype is torch.float32:
        assert found.figure.startswith("42 of 42 tokens, ")


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
    found = decoders._check_decoder("llama", torch.bfloat16, has_graphs=False)
    assert found.verdict is RowVerdict.failed


def sent_0() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.long, device="cuda")


def test_every_fused_family_has_a_model() -> None:
    fused = {name for name, family in FAMILIES.items() if family.block is not None}
    assert fused == {name.partition("-")[0] for name in decoders.MODELS}


@pytest.mark.parametrize(
    "there",
    [
        HERE | {SFT: 5.7 * 1.01},
        HERE | {REWARD: 0.67 * 0.99},
        HERE | {SCORE: 0.0},
        HERE | {SFT: math.nan},
        HERE | {SCORE: math.nan},
        {SFT: 5.703},
    ],
)
def test_losses_that_rounding_does_not_explain(there: pipelines.Losses) -> None:
    assert pipelines.losses_agree(HERE, HERE, 1e-6)
    assert pipelines.losses_agree(HERE | {SFT: 5.703, SCORE: -0.45}, HERE, 8e-3)
    assert not pipelines.losses_agree(there, HERE, 8e-3)


def test_a_digest_that_is_not_of_the_stored_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks sum their digests: a rank that counts twice, or not at all, is found."""
    weights_N = torch.arange(5.0)
    digest = int(digest_of_slice(weights_N, 0)) % 2**64
    values = {"actor/right": digest, "actor/wrong": digest + 1}
    digests = {name: f"{value:016x}" for name, value in values.items()}
    lines = [{"phase": "ppo", "step": step, "weights": digests} for step in (2, 3)]
    (tmp_path / "digests.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    folder = tmp_path / "ppo" / "state" / "step-00000002"  # that of step 3 is not kept
    folder.mkdir(parents=True)
    read = SimpleNamespace(build_tensor_reader=lambda engine: lambda name, part: weights_N[part])
    monkeypatch.setattr(pipelines, "load_checkpoint", {folder: read}.__getitem__)
    assert pipelines.differing_digests(tmp_path) == ["ppo/actor/wrong"]
    assert pipelines.differing_digests(folder) == []


def test_a_collective_that_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = current_ranks(Device.cpu)
    assert collectives.differing_results(ranks, torch.bfloat16) == []
    monkeypatch.setattr(torch.distributed, "reduce_scatter_tensor", lambda *_: None)
    found = collectives.differing_results(ranks, torch.bfloat16)
    assert found == ["reduce-scatter in torch.bfloat16"]


@pytest.mark.parametrize(
    ("mib", "growth", "verdict"),
    [([0, 0, 0, 0], 0, "passed"), ([9, 9, 8, 9], -1, "passed"), ([1, 2, 3, 5], 1, "failed")],
)
def test_memory_that_grows_with_every_step(
    mib: list[int], growth: int, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Graphs and KV cache come with the first steps, or with rows of another number, and stay."""
    config = SimpleNamespace(ppo=SimpleNamespace(rollout_batch_size=2))
    trainer = SimpleNamespace(generate_experience=str, train_rlhf=str)
    live = iter([1 << 30, 2 << 30, *((2 << 30) + (each << 20) for each in mib)])
    monkeypatch.setattr(memory, "load_run", lambda _: config)
    monkeypatch.setattr(memory, "RLHFEngine", lambda _: SimpleNamespace(prompts=lambda *_, **__: 0))
    monkeypatch.setattr(memory, "PPOTrainer", lambda *_: trainer)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(live))
    found = memory._check_growth(tmp_path)
    assert found.verdict == verdict
    assert found.numbers["growth_bytes"] == growth << 20
    assert found.figure.startswith("2.000 GiB after step 2, ")


# Serves the file weight_info; its last argument is the port.
SERVER = """#!/bin/sh
test "$1 $2" = "serve {model}" || exit 1
for port; do :; done
exec {python} -m http.server --bind 127.0.0.1 --directory {folder} "$port"
"""


def test_ppo_gets_a_vllm_server_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tmp_path / "sft" / "sft" / "model"
    server = SERVER.format(python=sys.executable, model=model, folder=tmp_path)
    (tmp_path / "weight_info").write_text('{"weight_version": "1"}')
    (tmp_path / "vllm").write_text(server)
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    started = []

    def run(run_dir: Path, *words: str) -> EndedRun:
        started.append(words)
        if len(started) == 2:  # PPO: its server answers
            url = words[-1].removeprefix("rollout.server.url=")
            assert VllmClient(url, timeout=1.0).fetch_weight_version() == "1"
        run_dir.mkdir()
        line = {"phase": "ppo", "step": 1, "ppo/logprob_mismatch": 0.03}
        (run_dir / "metrics.jsonl").write_text(f"{json.dumps(line)}\n")
        return EndedRun(run_dir=run_dir, code=0, output="", seconds=1.0)

    monkeypatch.setattr(rollouts, "run_to_end", run)
    found = rollouts._check_server(tmp_path)
    assert found.figure == "0.0300 nats"
    assert found.verdict is RowVerdict.failed
    assert f"model.path={model}" in started[1]
    with pytest.raises(RolloutError):  # it ended with the run
        VllmClient(started[1][-1].partition("=")[2], timeout=1.0).fetch_weight_version()


def test_runs_cover_engines_stages_precisions_and_offload(gpu: Gpu) -> None:
    names = set(pipelines.words_by_run("pipelines"))
    assert {f"DeepSpeed, stage {stage}, bf16" for stage in range(4)} <= names
    assert {"torch, stage 1, fp32", "offload, stage 3, bf16", "DeepSpeed, stage 3, fp16"} <= names
    assert all(Dtype(name.rpartition(" ")[2]) for name in names)


@pytest.mark.parametrize(
    ("dtype", "engines"),
    [
        (Dtype.bf16, ["torch, stage 1, bf16", "DeepSpeed, stage 2, bf16"]),
        (Dtype.fp16, ["DeepSpeed, stage 2, fp16"]),
    ],
)
def test_engines_are_resumed_in_the_precision_of_the_gpu(
    dtype: Dtype, engines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines, "resolve_dtype", lambda *_: dtype)
    monkeypatch.setattr(resume, "_compare_with_killed_run", lambda *_: None)
    assert [what for what, _ in resume.check_resume(tmp_path, Size.full)] == engines


PARTS = read_parts()


def tasks_of(part: CheckPart) -> Callable[[Path, Size], Iterator[Task]]:
    return getattr(import_module(f"rlhf.gpu_check.{part.module}"), f"check_{part.name}")


def test_every_part_has_its_function() -> None:
    assert all(callable(tasks_of(part)) for part in PARTS)


def test_remedies_are_keys_of_a_run(compose: Compose) -> None:
    """The page's first line names them, to be typed."""
    remedies = {words for part in PARTS for words in part.remedies.values()}
    for words in sorted(remedies):
        compose(["experiment=smoke", "hardware=a100_40g", words])


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS, ids=[part.name for part in PARTS])
def test_launch_options_of_a_part_are_accepted(
    part: CheckPart, gpu: Gpu, compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that no phase reads was refused, and five parts measured nothing on a real GPU."""
    started: list[list[str]] = []

    def run_launcher(run_dir: Path, words: list[str]) -> EndedRun:
        started.append([word for word in words if not runs.is_variable(word)])
        return EndedRun(run_dir=run_dir, code=1, output="not started", seconds=0.0)

    monkeypatch.setattr(runs, "_run_launcher", run_launcher)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(pipelines, "_check_collectives", measured_row)
    monkeypatch.setattr(rollouts, "which", str)
    if part.name not in ("machine", "kernels", "decoders"):
        for task in tasks_of(part)(tmp_path, Size.full):
            measure_row(*task)
        assert started
    for words in started:
        if not any(word.startswith("model.path=/") for word in words):  # that run trains it first
            there = [word.replace("hardware=auto", "hardware=a100_40g") for word in words]
            job = Job(compose([*there, "plan=only"]), there, is_plan=True)
            plan = plan_and_configure(build_new_config(job)).plan
            assert plan is not None
            assert plan.fits, words
