"""Whole runs on a pretended GPU, from the command line to the models that they save."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf.gpu_check.runs import differing_files
from tests.pretend_cuda.gpu import missing_to_pretend
from tests.runs import (
    EVALUATED_EPISODES,
    KEEP_ALL,
    ON_GPU,
    TINY_RUN,
    launch_on_gpu,
    metrics,
    python,
    unfinished_copy,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_to_pretend() is not None, reason=str(missing_to_pretend())),
]
A100 = [*TINY_RUN, "hardware=a100_40g"]
SHORT = ["experiment=smoke", "hardware=a100_40g", "rollout.max_response_tokens=4"]
PPO = [*SHORT, "phase=ppo", "ppo.eval_prompts=4", "ppo.sample_every=9"]
PPO += ["ppo.rollout_batch_size=8", "ppo.ppo_epochs=1"]
DPO = [*SHORT, "phase=dpo", "dpo.batch_size=16", "dpo.epochs=0.1", "dpo.eval_prompts=4"]
DPO += ["dpo.eval_examples=8"]


def on_gpu(run_dir: Path, *overrides: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a tiny pipeline on one A100."""
    words = [*A100, *overrides, f"run_dir={run_dir}"]
    return launch_on_gpu(*words, cwd=run_dir.parent, **how)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of ``tiny_run`` on a GPU."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    run = on_gpu(run_dir, "zero=stage1")
    assert run.returncode == 0, run.stderr
    assert "1 x cuda, fp32" in run.stdout
    return run_dir


def test_a_gpu_computes_what_a_cpu_does(trained: Path, tiny_run: Path) -> None:
    assert_same_metrics(trained, tiny_run)


def test_episodes_of_a_gpu_are_those_of_a_cpu(tmp_path: Path, episode_run: Path) -> None:
    """Rows are parked beside CUDA graphs, and extended by observations."""
    run = on_gpu(tmp_path / "run", *EVALUATED_EPISODES, "zero=stage1")
    assert run.returncode == 0, run.stderr
    assert_same_metrics(tmp_path / "run", episode_run)


def assert_same_metrics(on_gpu: Path, on_cpu: Path) -> None:
    for gpu_line, cpu_line in zip(metrics(on_gpu), metrics(on_cpu), strict=True):
        assert gpu_line.keys() == cpu_line.keys()
        for name, value in cpu_line.items():
            if isinstance(value, float):
                assert gpu_line[name] == pytest.approx(value, rel=2e-3, abs=2e-4), name


def test_commands_on_finished_runs_use_the_gpu(trained: Path) -> None:
    answers = []
    for words, env in ((["-m", "tests.pretend_cuda", "-m"], ON_GPU), (["-m"], {})):
        evaluated = python(*words, "rlhf.evaluate", trained, **env)
        assert evaluated.returncode == 0, evaluated.stderr
        assert ("launch: " in evaluated.stderr) is bool(env)
        assert ("allocator: expandable_segments:True" in evaluated.stderr) is bool(env)
        rows = (trained / "evaluation" / "answers.jsonl").read_text().splitlines()
        answers.append([json.loads(row)["response"] for row in rows])
    assert answers[0] == answers[1]


def test_fp16_is_resumed_exported_and_evaluated(trained: Path, tmp_path: Path) -> None:
    """Two GPUs, whose optimizers are on the host, reduce tensors of GPUs only, in one order.

    The CPU that exports and evaluates need not have fp16; weights of adapters are rounded.
    """
    words = [*PPO, f"from_run={trained}", "hardware.dtype=fp16", "hardware.ranks_per_node=2"]
    words += ["zero=stage3_offload", "zero.param_persistence_threshold=0"]  # tiny ones sharded, too
    words += ["lora=default", "ppo.ema_beta=0.9", "zero.offload_ema=true", "ppo.ptx_coef=0.5"]
    words += ["ppo.ptx_eval_blocks=2"]
    words += ["checkpoint.every_steps=1", *KEEP_ALL, "ppo.steps=2", "checkpoint.digest_every=1"]
    words += ["+zero.extra.fp16.initial_scale_power=8"]  # no step overflows, and so is skipped
    run_dir = tmp_path / "run"
    run = launch_on_gpu(*words, f"run_dir={run_dir}", machine="2xa100", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert_resumed_bit_for_bit(run_dir, machine="2xa100")
    for command in (
        ["rlhf.evaluate", run_dir],
        ["rlhf.export", run_dir, "--checkpoint", 2, "--average"],
    ):
        run = python("-m", *command)
        assert run.returncode == 0, run.stderr
    folders = (run_dir / "exported", run_dir / "ppo" / "actor_ema")
    exported, average = (load_file(folder / "model.safetensors") for folder in folders)
    for name, weights in exported.items():
        torch.testing.assert_close(weights, average[name], rtol=1e-3, atol=1e-5, check_dtype=False)


def assert_resumed_bit_for_bit(run_dir: Path, machine: str) -> None:
    """Its weights have digests, and after the last step it goes on from the first as it did."""
    lines = (run_dir / "digests.jsonl").read_text().splitlines()
    assert ("ppo", 2) in {(line["phase"], line["step"]) for line in map(json.loads, lines)}
    stopped = run_dir.with_name("stopped")
    unfinished_copy(run_dir, stopped, "ppo", after_step=1)
    resumed = launch_on_gpu(f"resume={stopped}", machine=machine, cwd=run_dir.parent)
    assert resumed.returncode == 0, resumed.stderr
    assert "continues after step 1" in resumed.stdout
    assert differing_files(run_dir, stopped) == []


@pytest.mark.parametrize(
    "words",
    [
        [*DPO, "zero=stage0"],
        [*PPO, "ppo.steps=1", "zero=stage1", "ppo.shared_trunk=true", "ppo.num_layers_unfrozen=1"],
    ],
    ids=["dpo", "trunk"],
)
def test_other_runs_on_a_gpu_in_bf16(trained: Path, tmp_path: Path, words: list[str]) -> None:
    words = [*words, "hardware.dtype=bf16", f"from_run={trained}"]
    run = launch_on_gpu(*words, f"run_dir={tmp_path / 'run'}", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    losses = [v for line in metrics(tmp_path / "run") for name, v in line.items() if "loss" in name]
    assert losses
    assert all(map(math.isfinite, losses))


@pytest.mark.soak
def test_two_gpus_whose_optimizer_is_on_the_host_train_beside_one_that_samples(
    trained: Path, tmp_path: Path
) -> None:
    """tests/soak_gpu.py has episodes, groups and lags on several GPUs."""
    words = ["zero=stage2_offload", "hardware.ranks_per_node=2", "hardware.dtype=bf16"]
    words += ["phase=ppo", f"from_run={trained}", "rollout.lag=1", "rollout.overlap=true"]
    words += ["ppo.eval_every=1", "ppo.eval_prompts=4"]
    words += ["checkpoint.digest_every=1", "checkpoint.every_steps=1", *KEEP_ALL]
    run = on_gpu(tmp_path / "run", *words, machine="3xa100")
    assert run.returncode == 0, run.stderr
    assert_resumed_bit_for_bit(tmp_path / "run", "3xa100")


@pytest.mark.parametrize(
    ("machine", "words", "code", "line"),
    [
        ("8xa100", [], 0, "8 x NVIDIA A100-SXM4-40GB, 39.4 GiB, bf16; rates of a100_40g"),
        ("v100", [], 0, "this machine's CPU, although it has a GPU: Tesla V100-SXM2-32GB (sm_70)"),
        ("old_driver", ["hardware.device=cuda"], 2, "update the NVIDIA driver 535.104.05 to 580"),
        ("v100", ["hardware=v100_32g", "plan=check"], 2, "install a build of torch for CUDA 12.6"),
    ],
)
def test_launch_on_a_machine(
    machine: str, words: list[str], code: int, line: str, tmp_path: Path
) -> None:
    run = launch_on_gpu(*TINY_RUN, "plan=only", *words, machine=machine, cwd=tmp_path)
    assert run.returncode == code
    said = [each for each in (run.stdout, run.stderr)[code // 2].splitlines() if line in each]
    (found,) = said
    assert found.startswith("error: " if code else f"hardware=auto: {line}")
    started = machine not in {"old_driver"}
    assert f"allocator: {'expandable_segments:True' if started else None}" in run.stderr
