"""Finished runs that the tests of this folder share, each with the keys that its phases read."""

from pathlib import Path

import pytest
from filelock import FileLock

from tests.runs import EVALUATED_EPISODES, TINY_RUN, python, session_folder

# Options of PPO that log and save more than the default run does.
OPTIONS = [
    "ppo.kl_placement=loss",
    "ppo.kl_estimator=k3",
    "ppo.dual_clip=3.0",
    "ppo.lr_guard_kl=1.0",
    "ppo.stop_update_kl=10.0",
    "ppo.entropy_coef=0.01",
    "ppo.entropy_target=0.5",
    "ppo.ptx_coef=0.5",
    "ppo.ema_beta=0.9",
    "ppo.eval_every=1",
    "ppo.sample_every=2",
    "ppo.log_rollouts_every=2",
    "sft.eval_every=1",
    "reward.members=2",
    "reward.epochs=0.02",
    "ppo.rollout_correction=token",
    "ppo.off_policy_mask_kl=0.01",
    "ppo.clip_cov_ratio=0.1",
    "ppo.teacher_prompt_column=answer",
    "ppo.advantage_estimator=grpo",  # the episodes have a critic
    "ppo.responses_per_prompt=2",
    "ppo.resampling_rounds=1",
    "rewards={model: {kind: model}, ends: {kind: stop, weight: 0.1}}",
    "tracking=tensorboard",
]
DPO = ["phase=pipeline_dpo", "dpo.batch_size=16", "dpo.epochs=0.2", "dpo.eval_every=1"]
DPO += ["dpo.lr=1e-3", "dpo.warmup_steps=2", "dpo.eval_prompts=8", "dpo.eval_examples=16"]
DPO += ["model.dropout=0.3"]  # of SFT: DPO learns without, or policy and reference would differ


def recorded(factory: pytest.TempPathFactory, name: str, *words: str) -> Path:
    """Return a finished run beside which NAME.json has the keys that each phase read."""
    folder = session_folder(factory) / "recorded"
    folder.mkdir(exist_ok=True)
    run_dir = folder / name
    with FileLock(folder / f"{name}.lock"):
        if not (run_dir / "result.json").exists():
            command = ["-m", "tests.config_reads", folder / f"{name}.json", *TINY_RUN, *words]
            run = python(*command, f"run_dir={run_dir}")
            assert run.returncode == 0, run.stderr
    return run_dir


@pytest.fixture(scope="session")
def option_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    corpus.write_text("\n\n".join(f"text number {number}" for number in range(60)))
    return recorded(tmp_path_factory, "options", *OPTIONS, f"data.ptx_path={corpus}")


@pytest.fixture(scope="session")
def dpo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory, "dpo", *DPO)


@pytest.fixture(scope="session")
def episode_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory, "episodes", *EVALUATED_EPISODES)
