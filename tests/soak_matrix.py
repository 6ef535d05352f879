"""Stop a run of every engine, stage, number of ranks and kind of model in every phase.

    python -m tests.soak_matrix [--folder FOLDER]     (make soak)

Each run is killed three times: after an epoch boundary of SFT, in a save of the reward phase (or
of DPO), and inside the updates of a PPO rollout. Resumed each time, it must equal the run that was
never killed, bit for bit in weights, metrics, samples and results.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rlhf.gpu_check.runs import differing_files
from tests.killer import PATH
from tests.runs import ROOT, TINY_RUN, launch

PLACES = [
    *([f"zero=stage{stage}", "zero.engine=torch"] for stage in range(4)),
    *([f"zero=stage{stage}", "zero.engine=deepspeed"] for stage in range(4)),
    *([f"zero=stage{stage}", "hardware.ranks_per_node=2"] for stage in range(4)),
    *([f"zero=stage{stage}_offload", "hardware.ranks_per_node=2"] for stage in (2, 3)),
]
# Two steps are an epoch of SFT, so the checkpoint before its kill is at the boundary.
TRAINING = [*TINY_RUN, "data.size=400", "sft.batch_size=40", "reward.batch_size=64"]
TRAINING += ["sft.epochs=2", "reward.epochs=1.2"]
KILLS = {"sft": "sft:3", "reward": "reward:4:save", "dpo": "dpo:4:save", "ppo": "ppo:4:update"}
PPO = ["ppo.steps=4", "ppo.eval_prompts=4", "ppo.eval_every=3", "rollout.max_response_tokens=8"]
STEPS = ["checkpoint.every_steps=2", "hardware.dtype=fp32", f"tracking.others=[{PATH}]"]
# Runs of all phases, and runs of PPO that start from the models of the first.
PIPELINES = {
    "plain": [],
    "LoRA": ["lora=default"],
    "bf16": ["hardware.dtype=bf16"],
    "DPO": ["phase=pipeline_dpo", "dpo.batch_size=16"],
}
PPO_RUNS = {
    "trunk": ["ppo.shared_trunk=true", "ppo.num_layers_unfrozen=1"],
    "average": ["ppo.ema_beta=0.9"],
    "ptx": ["ppo.ptx_coef=0.5"],
    "epochs": ["ppo.ppo_epochs=2", "ppo.kl_target=1", "ppo.scale_reward=running"],
}


def compare(folder: Path, overrides: Sequence[str], phases: Sequence[str]) -> str:
    """Run once without and once with a kill in each phase; return how the two runs compare."""
    whole, killed = folder / "whole", folder / "killed"
    folder.mkdir(parents=True)
    words = [*overrides, *STEPS]
    run = launch(*words, f"run_dir={whole}", cwd=folder, PYTHONPATH=ROOT)
    if run.returncode == 2:
        return f"refused: {run.stderr.strip()}"
    words += [f"run_dir={killed}"]
    for kill_at in [*(KILLS[phase] for phase in phases), ""]:
        resumed = launch(*words, cwd=folder, PYTHONPATH=ROOT, KILL_AT=kill_at)
        if words == [f"resume={killed}"] and "continues after step 2" not in resumed.stdout:
            return f"FAILED: nothing to continue from before {kill_at}: {resumed.stderr}"
        words = [f"resume={killed}"]
    if run.returncode or resumed.returncode:
        return f"FAILED: {run.stderr}{resumed.stderr}"
    found = differing_files(whole, killed)
    return f"DIFFERENT: {', '.join(found)}" if found else "equal"


def compare_all(folder: Path, place: Sequence[str]) -> list[str]:
    """Compare the runs of all kinds on one engine; return the answers that are not "equal"."""
    found = []
    here = folder / "_".join(word.split("=")[1] for word in place)
    for name, options in (PIPELINES | PPO_RUNS).items():
        phases = ["sft", "dpo"] if name == "DPO" else ["sft", "reward", "ppo"]
        words = [*TRAINING, *PPO]
        if name in PPO_RUNS:
            phases = ["ppo"]
            words = ["experiment=smoke", *PPO, f"from_run={here / 'plain' / 'whole'}"]
        began = time.monotonic()
        answer = compare(here / name, [*words, *place, *options], phases)
        print(f"{' '.join(place)}, {name}: {answer} ({time.monotonic() - began:.0f} s)", flush=True)
        found += [answer] if answer != "equal" else []
    return found


def main() -> int:
    """Run the matrix; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp(prefix="soak-matrix-"))
    os.environ.update(DS_ACCELERATOR="cpu")
    began = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [a for answers in pool.map(partial(compare_all, folder), PLACES) for a in answers]
    wrong = [answer for answer in found if not answer.startswith("refused")]
    count = len(PLACES) * len(PIPELINES | PPO_RUNS)
    print(
        f"{count} kinds of runs in {(time.monotonic() - began) / 60:.1f} minutes: "
        f"{count - len(found)} equal, {len(found) - len(wrong)} refused, {len(wrong)} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
