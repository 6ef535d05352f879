"""Run every family, precision, stage and kind of run on a pretended GPU, and compare with the CPU.

    python -m tests.soak_gpu [--minutes 30] [--folder FOLDER]     (make soak)

The product of all settings has 3,500 runs. Faults nearly always need one or two settings, so every
pair of settings is in a run: ``covering`` chooses them, those with the most new pairs first. Each
run is executed three times: on the GPU, on the GPU with a kill in PPO and resumed, which must be
equal bit for bit, and on as many CPU ranks in fp32. In fp32 all metrics must agree with the CPU's,
in half precision the losses of SFT and of the reward model, and log-probs of rollout and training.
Runs that the time does not reach are counted.
"""

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.models.families import FAMILIES as NAMED
from rlhf.models.families import UNKNOWN
from tests.killer import PATH
from tests.rollout.decoder_checks import FAMILIES
from tests.runs import EVALUATED_EPISODES, ROOT, TINY_RUN, launch, launch_on_gpu, metrics
from tests.soak import differing_files

Axes = Mapping[str, Mapping[str, Sequence[str]]]  # setting -> value -> overrides
Row = Mapping[str, str]

SHAPE = {"max_position_embeddings": 512, "n_positions": 512, "max_seq_len": 512, "vocab_size": 400}
SHAPE |= {"initializer_range": 0.1, "sliding_window": 512}
RUN = [*TINY_RUN, "model=pretrained", "model.init=random", "model.path=null"]
RUN += ["model.vocab_size=400"]
RUN += ["sft.eval_examples=8", "reward.eval_examples=8", "ppo.eval_prompts=8", "ppo.eval_every=1"]
RUN += ["checkpoint.every_steps=1", f"tracking.others=[{PATH}]"]
ON_GPU = ["hardware=a100_40g"]
ON_CPU = ["hardware=cpu", "hardware.dtype=fp32", "zero=stage1"]
# What the run on the CPU does not have. It has as many ranks: each draws its own mini-batches.
OF_GPU = {"dtype", "stage", "graphs", "zero", "engine"}
DTYPES = {name: [f"hardware.dtype={name}"] for name in ("fp32", "bf16", "fp16")}


def switch(*overrides: str) -> dict[str, Sequence[str]]:
    """Return the values of a setting that is on or off."""
    return {"no": (), "yes": overrides}


PPO: Axes = {
    "trained": {  # a trunk is refused with adapters
        "all": (),
        "LoRA": ["lora=default"],
        "trunk": ["ppo.shared_trunk=true", "ppo.num_layers_unfrozen=1"],
    },
    "average": {
        **switch("ppo.ema_beta=0.9"),
        "average_on_host": ["ppo.ema_beta=0.9", "zero.offload_ema=true"],
    },
    "ptx": switch("ppo.ptx_coef=0.5"),
}


def shape(family: str) -> list[str]:
    """Return the overrides that make the models of a run small ones of ``family``."""
    fields = FAMILIES[family] | {k: v for k, v in SHAPE.items() if k in FAMILIES[family]}
    fields = fields | {"model_type": family.partition("-")[0], "initializer_range": 0.1}
    return [f"++model.architecture.{name}={value}" for name, value in fields.items()]


TORCH: Axes = {
    "family": {family: shape(family) for family in FAMILIES},
    "dtype": DTYPES,
    "stage": {str(stage): [f"zero=stage{stage}"] for stage in (0, 1)},
    "graphs": {"yes": (), "no": ["rollout.cuda_graphs=false"]},
    **PPO,
}
FROZEN = ["zero.offload_reference=true", "zero.offload_reward=true"]
DEEPSPEED: Axes = {
    "zero": {
        **{f"stage{stage}": [f"zero=stage{stage}"] for stage in range(4)},
        "stage2_offload": ["zero=stage2_offload"],
        "stage3_offload": ["zero=stage3_offload", *FROZEN],
        "frozen": ["zero=stage1", "zero.reference_stage=3", "zero.reward_stage=3", *FROZEN],
    },
    "dtype": DTYPES,
    "family": {family: shape(family) for family in ("opt", "qwen3")},
    "rollout": {"fast": (), "hf": ["rollout=hf"]},
    **PPO,
    "engine": {"deepspeed": ["zero.engine=deepspeed"]},
}

SIZES = ["sft.batch_size=12", "reward.batch_size=12", "ppo.mini_batch_size=6"]  # of 2 and 3 ranks
SIZES += ["ppo.rollout_batch_size=12", "sft.eval_examples=12", "reward.eval_examples=12"]
SIZES += ["ppo.eval_prompts=12"]
GROUPS = ["ppo.advantage_estimator=grpo", "ppo.responses_per_prompt=2"]
SEVERAL: Axes = {
    "family": {"qwen3": shape("qwen3")},
    "ranks": {str(ranks): [f"hardware.ranks_per_node={ranks}"] for ranks in (2, 3)},
    "zero": {
        "stage1_offload": ["zero=stage1", "zero.offload_optimizer=true"],
        "stage2_offload": ["zero=stage2_offload"],
        # With the threshold 0 even tiny weights are sharded.
        "stage3_offload": ["zero=stage3_offload", *FROZEN, "zero.param_persistence_threshold=0"],
    },
    "dtype": DTYPES,
    "kind": {
        "episodes": [*EVALUATED_EPISODES, *SIZES],
        "resampled": [*SIZES, *GROUPS, "ppo.resampling_rounds=1"],
        "lag": [*SIZES, "rollout.lag=1"],
    },
}


def pairs(row: Row) -> set[tuple[tuple[str, str], ...]]:
    """Return all pairs of settings of a run."""
    return set(itertools.combinations(row.items(), 2))


def is_possible(row: Row) -> bool:
    """Return False for what is refused.

    fp16 requires masters, and so stage 1; a trunk requires a family whose blocks have a name.
    """
    has_masters = row.get("stage", row.get("zero")) not in {"0", "stage0"}
    has_blocks = NAMED.get(row["family"].partition("-")[0], UNKNOWN).blocks is not None
    return (has_masters or row["dtype"] != "fp16") and (has_blocks or row.get("trained") != "trunk")


def covering(axes: Axes) -> Iterator[Row]:
    """Yield runs until every possible pair of settings is in one of them; greedy."""
    names = list(axes)
    rows = (dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values()))
    candidates = [(row, pairs(row)) for row in rows if is_possible(row)]
    missing = set().union(*(own for _, own in candidates))
    while missing:
        row, own = max(candidates, key=lambda each: len(each[1] & missing))
        missing -= own
        yield row


def apart(there: Path, here: Path, *, is_half: bool) -> list[str]:
    """Return the metrics in which a run on the GPU differs from that on the CPU by too much."""
    found = []
    for gpu, cpu in zip(metrics(there), metrics(here), strict=True):
        for name, value in cpu.items():
            if not isinstance(value, float):
                continue
            other = gpu[name]
            rel, absolute = (0.05, 0.02) if is_half else (2e-3, 2e-4)
            if is_half and not name.endswith("/loss"):
                # A norm is null in a step that an overflow of fp16 has skipped.
                is_same = "loss" not in name or (other is not None and math.isfinite(other))
            else:
                is_same = math.isclose(other, value, rel_tol=rel, abs_tol=absolute)
            found += [] if is_same else [f"{name} at {gpu.get('step')}: {other}, CPU {value}"]
        if (mismatch := gpu.get("ppo/logprob_mismatch", 0.0)) > (0.05 if is_half else 1e-4):
            found.append(f"ppo/logprob_mismatch: {mismatch}")
    return found


def check(folder: Path, until: float, axes: Axes, row: Row) -> str:
    """Run one kind of run; return "" or what is wrong with it."""
    began = time.monotonic()
    if began > until:
        return "out of time"
    name = "-".join(key if value == "yes" else value for key, value in row.items() if value != "no")
    here = folder / name
    here.mkdir()
    settings = {key: axes[key][value] for key, value in row.items()}
    words = [*RUN, *itertools.chain(*settings.values())]
    same = [*RUN, *itertools.chain(*(settings[key] for key in settings.keys() - OF_GPU))]
    how: dict[str, Any] = {"cwd": here, "PYTHONPATH": ROOT}
    whole, killed, cpu = here / "whole", here / "killed", here / "cpu"
    gpus = {**how, "machine": "3xa100"}
    run = launch_on_gpu(*words, *ON_GPU, f"run_dir={whole}", **gpus)
    launch_on_gpu(*words, *ON_GPU, f"run_dir={killed}", KILL_AT="ppo:2", **gpus)
    resumed = launch_on_gpu(f"resume={killed}", **gpus)
    beside = launch(*same, *ON_CPU, f"run_dir={cpu}", **how)
    failed = [each for each in (run, resumed, beside) if each.returncode]
    if failed:
        answer = f"FAILED: {failed[0].stderr[-2000:]}"
    elif "continues after step 1" not in resumed.stdout:
        answer = f"FAILED: nothing to continue from: {resumed.stdout}"
    else:
        wrong = differing_files(whole, killed) + apart(whole, cpu, is_half=row["dtype"] != "fp32")
        answer = f"DIFFERENT: {'; '.join(wrong)}" if wrong else ""
    print(f"{name}: {answer or 'equal'} ({time.monotonic() - began:.0f} s)", flush=True)
    return answer


def main() -> int:
    """Run the matrix; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="soak-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(DS_ACCELERATOR="cpu", RLHF_CACHE=str(folder / "cache"))
    began = time.monotonic()
    until = began + 60 * asked.minutes
    answers: list[str] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for axes in (SEVERAL, DEEPSPEED, TORCH):
            answers += pool.map(partial(check, folder, until, axes), covering(axes))
    skipped = answers.count("out of time")
    wrong = len([answer for answer in answers if answer]) - skipped
    print(
        f"{len(answers)} kinds of runs in {(time.monotonic() - began) / 60:.1f} minutes: "
        f"{len(answers) - wrong - skipped} equal, {wrong} wrong, {skipped} not run in time"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
