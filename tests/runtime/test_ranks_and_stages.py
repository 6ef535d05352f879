"""Neither ZeRO stage, number of ranks nor micro-batch size changes what is computed."""

import json
from pathlib import Path

import pytest

from rlhf.base.stored_files import read_json_lines
from rlhf_lab.branches.critic_states import CriticState
from rlhf_lab.branches.true_value_charts import CRITIC_STATE
from tests.runs import ROOT, TINY_RUN, finished, launch, metrics, python, soaked

pytestmark = pytest.mark.slow

# One pass over a rollout in one piece: later updates would differ by what rounding has changed.
WHOLE_ROLLOUT = ["ppo.ppo_epochs=1", "ppo.rollout_batch_size=8", "ppo.mini_batch_size=8"]
WHOLE_ROLLOUT += ["ppo.steps=1", "ppo.warmup_steps=0", "ppo.eval_prompts=2"]
WHOLE_ROLLOUT += ["rollout.max_response_tokens=5"]
WHOLE_ROLLOUT += ["reward.epochs=0.05", "reward.eval_examples=8", "sft.eval_examples=8"]
CHECK = ["ppo.critic_check.every=1", "ppo.critic_check.states=8", "ppo.critic_check.branches=4"]
# Every weight is sharded, however small: by default DeepSpeed leaves such small ones whole.
SHARD_ALL = ["+zero.extra.zero_optimization.stage3_param_persistence_threshold=0"]
FIRST_LOSSES = {
    "sft": ("sft/loss", "sft/grad_norm"),
    "reward": ("reward/loss", "reward/grad_norm"),
    "ppo": ("ppo/critic_loss", "ppo/score_mean", "ppo/entropy", "ppo/actor_grad_norm"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    return finished(folder / "run", "zero=stage0", *WHOLE_ROLLOUT, *CHECK)


def first(run_dir: Path) -> dict[str, float]:
    lines = metrics(run_dir)
    return {
        name: next(line[name] for line in lines if line["phase"] == phase and name in line)
        for phase, names in FIRST_LOSSES.items()
        for name in names
    }


def assert_first_losses(run_dir: Path, plain: Path) -> None:
    """All are equal up to rounding, which has grown in a score while the reward model learned."""
    losses, expected = first(run_dir), first(plain)
    score = losses.pop("ppo/score_mean")
    assert score == pytest.approx(expected.pop("ppo/score_mean"), rel=2e-3)
    assert losses == pytest.approx(expected, rel=2e-5, abs=1e-5)


DEEPSPEED = "zero.engine=deepspeed"  # by default one rank runs in plain torch
MICRO = [f"{phase}.micro_batch_size=2" for phase in ("sft", "reward", "ppo")]
WAYS = {
    "stage1, micro-batches": ["zero=stage1", *MICRO],
    "stage0, deepspeed": ["zero=stage0", DEEPSPEED],
    "stage1, deepspeed": ["zero=stage1", DEEPSPEED],
    "stage2, deepspeed": ["zero=stage2", DEEPSPEED],
    "stage3, deepspeed": ["zero=stage3", DEEPSPEED, *SHARD_ALL],
    "stage0, 2 ranks": ["zero=stage0", "hardware.ranks_per_node=2"],
    "stage1, 2 ranks": ["zero=stage1", "hardware.ranks_per_node=2"],
    "stage2, 2 ranks, micro-batches": ["zero=stage2", "hardware.ranks_per_node=2", *MICRO],
}


# Two ranks in other stages, and half precision below, compute with the same engines.
LEFT_TO_SOAK = [f"stage{stage}, deepspeed" for stage in range(4)]
LEFT_TO_SOAK += ["stage0, 2 ranks", "stage1, 2 ranks"]


@pytest.mark.parametrize("way", soaked(WAYS, *LEFT_TO_SOAK))
def test_first_losses_are_equal(way: str, plain: Path, tmp_path: Path) -> None:
    run = finished(tmp_path / "run", *WAYS[way], *WHOLE_ROLLOUT)
    assert_first_losses(run, plain)
    assert (run / "ppo" / "actor" / "model.safetensors").exists()


def first_responses(run_dir: Path) -> list[tuple[str, str]]:
    """Prompts and responses of PPO's first step that were kept as samples."""
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    return [(each["prompt"], each["response"]) for each in samples if each["step"] == 1]


def assert_first_critic_states(run_dir: Path, plain: Path) -> None:
    """States of the first step's check and their true values are equal up to rounding."""
    found, expected = (
        [
            each
            for each in read_json_lines(folder / "critic.jsonl", CRITIC_STATE)
            if each["step"] == 1
        ]
        for folder in (run_dir, plain)
    )
    assert len(expected) > 4
    assert len({each["true_value"] for each in expected}) > 4
    for each, reference in zip(found, expected, strict=True):
        numbers = [[state[name] for name in CriticState._fields] for state in (each, reference)]
        assert numbers[0] == pytest.approx(numbers[1], rel=2e-3, abs=2e-4)


@pytest.mark.parametrize("how", soaked(["always", "never", "hf"], "never", "hf"))
def test_ranks_with_sharded_weights_give_the_responses_of_one(
    how: str, plain: Path, tmp_path: Path
) -> None:
    """Of three phases, or of the last from the models of ``plain``."""
    words = ["zero=stage3", "hardware.ranks_per_node=2", *SHARD_ALL, *WHOLE_ROLLOUT]
    if how != "hf":  # which continues no responses
        words += CHECK
    if how == "always":
        words += ["rollout.gather_weights=always"]
        run = finished(tmp_path / "run", *words)
        assert_first_losses(run, plain)
    else:
        words += ["rollout=hf"] if how == "hf" else ["rollout.gather_weights=never"]
        words += ["phase=ppo", f"from_run={plain}", f"run_dir={tmp_path / 'run'}"]
        own = [word for word in TINY_RUN if not word.startswith(("data", "model"))]
        process = launch(*own, *words, cwd=tmp_path)
        assert process.returncode == 0, process.stderr
        run = tmp_path / "run"
    assert (run / "ppo" / "actor" / "model.safetensors").exists()
    if how != "hf":
        assert_first_critic_states(run, plain)
    assert len(first_responses(plain)) > 1
    assert len({response for _, response in first_responses(plain)}) > 1
    assert first_responses(run) == first_responses(plain)


MINI_BATCHES = ["phase=ppo", "ppo.rollout_batch_size=16", "ppo.mini_batch_size=8"]
MINI_BATCHES += ["ppo.ppo_epochs=2", "ppo.steps=3", "ppo.warmup_steps=0", "ppo.eval_prompts=4"]
MINI_BATCHES += ["zero=stage1", "rollout.max_response_tokens=12", "ppo.micro_batch_size=2"]
OF_STEP = "clipfrac approx_kl entropy actor_loss critic_loss actor_grad_norm critic_grad_norm"


def test_any_number_of_ranks_learns_from_the_same_mini_batches(plain: Path, tmp_path: Path) -> None:
    """Two updates in each of two passes, in three steps: equal up to rounding, which grows."""
    own = [word for word in TINY_RUN if not word.startswith(("data", "model"))]
    found = []
    for ranks in (1, 2, 4):
        run = tmp_path / str(ranks)
        words = [*MINI_BATCHES, f"hardware.ranks_per_node={ranks}", f"run_dir={run}"]
        process = launch(*own, *words, f"from_run={plain}", cwd=tmp_path)
        assert process.returncode == 0, process.stderr
        lines = [line for line in metrics(run) if "ppo/critic_loss" in line]
        assert len(lines) == 3
        found.append([line[f"ppo/{name}"] for line in lines for name in OF_STEP.split()])
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


HALF = [  # what tests/engine compares at stage 0 is left to soak
    pytest.param("bf16", 0, "torch", "sft", marks=pytest.mark.soak),
    ("bf16", 1, "torch", "sft"),
    pytest.param("bf16", 0, "deepspeed", "sft", marks=pytest.mark.soak),
    ("bf16", 3, "deepspeed", "sft"),
    ("fp16", 2, "auto", "pipeline"),
]


@pytest.mark.parametrize(("dtype", "stage", "engine", "phase"), HALF)
def test_half_precision_follows_fp32(
    dtype: str, stage: int, engine: str, phase: str, plain: Path, tmp_path: Path
) -> None:
    """The first phase tells; that of fp16 must run all phases to their end."""
    run = tmp_path / "run"
    how = [f"hardware.dtype={dtype}", f"zero.engine={engine}", f"zero=stage{stage}"]
    how += [f"phase={phase}", *WHOLE_ROLLOUT]
    program = ["-m", "tests.emulated_fp16"] if dtype == "fp16" else ["launch.py"]
    process = python(*program, *TINY_RUN, *how, f"run_dir={run}", cwd=ROOT)
    assert process.returncode == 0, process.stderr
    lines = [line for line in metrics(run) if "sft/loss" in line]
    expected = [line for line in metrics(plain) if "sft/loss" in line]
    for got, reference in zip(lines, expected, strict=True):
        assert got["sft/loss"] == pytest.approx(reference["sft/loss"], rel=5e-3)
    assert lines[-1]["sft/loss"] < lines[0]["sft/loss"]
