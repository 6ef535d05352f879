"""Pin what the program computes, and compare later: a refactoring must change none of it.

    python -m tests.pins write FILE.json [--only runs configs refusals] [--names NAME ...]
    python -m tests.pins compare FILE.json    (same options; exit code 1 if a pin is not equal)

Runs: weights, metrics without times, and samples of small runs. Configs: the composed configuration
of each experiment. Refusals: exit code and named keys of wrong commands, not their wording.
Everything goes through launch.py and files of run directories, so any module may move. Pins are
valid on the machine that wrote them: other CPUs and libraries round differently.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from safetensors import deserialize

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "conf" / "experiment"
AT_ONCE = 2
SECONDS = 1200  # per command
STOPPED = 130  # exit code of a run that checkpoint.stop_after stops
# PYTHONPATH: a worktree that shares its environment with another checkout imports its own modules.
ENVIRONMENT = {
    **{"PYTHONPYCACHEPREFIX": str(Path(sys.prefix) / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""},
    **{"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    **{"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
}
TEXTS = ("samples.jsonl", "critic.jsonl", "alarms.jsonl", "ppo/held_out.json")
TIMING = re.compile(r"(time|speed|memory)/|.*_per_second$")  # differs between two equal runs

SFT = """experiment=smoke hardware.cores_per_rank=1 model.vocab_size=400 data.size=600
    sft.batch_size=16 sft.epochs=4 sft.lr=1e-2"""  # enough for responses that end
PPO = "ppo.steps=2 rollout.max_response_tokens=8"
REWARD = "reward.batch_size=16 reward.epochs=0.2"
ALL = f"{SFT} {REWARD} {PPO}"
RULE = f"{SFT} {PPO} phase=pipeline_rule model@reward_model=gold"
RUNS = {
    "smoke": ALL,
    "another seed": f"{ALL} seed=2",
    "bf16": f"{ALL} hardware.dtype=bf16 zero=stage1 zero.moments=bf16",
    "DPO": f"{SFT} phase=pipeline_dpo dpo.batch_size=16 dpo.epochs=0.2",
    "LoRA": f"{ALL} lora=default",
    "shared trunk": f"{ALL} ppo.shared_trunk=true ppo.num_layers_unfrozen=1 ppo.kl_target=1",
    "GRPO": f"""{ALL} ppo.advantage_estimator=grpo ppo.responses_per_prompt=4 ppo.kl_estimator=k3
        ppo.kl_placement=loss ppo.loss_aggregation=sequence_mean ppo.resampling_rounds=1""",
    "rule": f"""{RULE}
        'rewards={{short: {{kind: length, most: 4, slack: 4}}, gold: {{kind: gold}}}}'""",
    "environment": f"""{SFT} ppo.steps=2 phase=pipeline_rule model@reward_model=gold
        data=environment environment=number_guessing environment.processes=2 ppo.gae_unit=turn
        '+rewards.environment={{kind: environment}}' rollout.max_response_tokens=5""",
    "lag, beside training": f"{ALL} ppo.steps=4 rollout.lag=1 rollout.overlap=true",
    "correction": f"""{RULE} ppo.steps=4 rollout.lag=2 ppo.rollout_correction=sequence
        ppo.rollout_correction_mode=mask ppo.rollout_correction_floor=0.5""",
    "vine": f"""{RULE} ppo.rollout_correction=token ppo.value_targets=monte_carlo
        ppo.value_branches=3 ppo.critic_check.every=1 ppo.critic_check.states=8
        ppo.critic_check.branches=4""",
    "ensemble": f"{ALL} reward.members=3 reward.combine=uncertainty",
    "ptx and moving average": f"{ALL} ppo.ptx_coef=0.5 ppo.ema_beta=0.9 ppo.scale_reward=running",
    "generate": f"{RULE} rollout=hf rollout.top_p=0.9 rollout.temperature=0.8",
    "torch, stage 3": f"{ALL} zero=stage3 zero.engine=torch",
    **{f"DeepSpeed, stage {n}": f"{ALL} zero=stage{n} zero.engine=deepspeed" for n in range(3)},
    "DeepSpeed, stage 3": f"""{ALL} zero=stage3 zero.engine=deepspeed
        zero.param_persistence_threshold=0""",
    "stage 2, 2 ranks": f"""{ALL} zero=stage2 hardware.ranks_per_node=2 sft.micro_batch_size=4
        reward.micro_batch_size=4 ppo.micro_batch_size=4""",
    "stage 3, 2 ranks": f"""{ALL} zero=stage3 hardware.ranks_per_node=2
        zero.param_persistence_threshold=0""",
    "stopped and resumed": f"{ALL} ppo.steps=4 checkpoint.stop_after=ppo/2",  # see pin_run
}

# The run of refusals that begin from a run: it finished SFT and was stopped in its reward phase.
BEGUN = f"{SFT} {REWARD} phase.order=[sft,reward] checkpoint.stop_after=reward/1"
FROM_BEGUN = [
    *(f"from_run={{run}} {word}" for word in ("data.size=9", "phase=ppo", "seed=2")),
    *(f"resume={{run}} {word}" for word in ("seed=2", "nonsense=1")),
]
REFUSALS = Path(__file__).with_name("config") / "bad_commands.txt"
# Keys in a message: a name with dots, or one before "=", outside of paths.
KEY = re.compile(r"(?<![\w./@=-])[a-z]\w*(?:[.@]\w+)*(?==)|(?<![\w./@=-])[a-z]\w+(?:\.\w+)+")

Pin = dict[str, Any]  # what was found, by the name of a part, such as a file


def launch(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run launch.py in ``folder``, with a cache beside it that no other program shares."""
    return subprocess.run(
        [sys.executable, ROOT / "launch.py", *words],
        env=os.environ | ENVIRONMENT | {"RLHF_CACHE": str(folder.parent / "cache")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def pin_run(name: str, folder: Path) -> Pin:
    """Return the digests of what a run has made; resume the run if its words stop it."""
    run_dir = folder / "run"
    process = start_run(RUNS[name], run_dir)
    if process.returncode == STOPPED:
        process = launch(f"resume={run_dir}", "checkpoint.stop_after=null", folder=folder)
    if process.returncode:
        return failure(process)
    models = [path for path in run_dir.rglob("*.safetensors") if "state" not in path.parts]
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: v for key, v in line.items() if not TIMING.match(key)} for line in metrics]
    pin = {str(path.relative_to(run_dir)): digest_of_tensors(path) for path in sorted(models)}
    texts = {name: run_dir / name for name in TEXTS if (run_dir / name).exists()}
    pin |= {name: digest(path.read_text()) for name, path in texts.items()}
    return pin | {"metrics.jsonl": digest(kept)}


def start_run(words: str, run_dir: Path) -> subprocess.CompletedProcess[str]:
    """Run into ``run_dir``, in fp32 at stage 0 unless ``words`` say otherwise."""
    # Not zero=auto and hardware.dtype=auto: what they choose depends on speeds that are measured.
    dtype = "" if "hardware.dtype=" in words else "hardware.dtype=fp32"
    stage = "" if "zero=" in words else "zero=stage0"
    run_dir.parent.mkdir(exist_ok=True)
    chosen = shlex.split(f"{words} {dtype} {stage}")
    return launch(*chosen, f"run_dir={run_dir}", folder=run_dir.parent)


def pin_config(name: str, folder: Path) -> Pin:
    """Return the digest of each group in the configuration that an experiment composes."""
    process = launch(f"experiment={name}", "--cfg", "job", folder=folder)
    if process.returncode:
        return failure(process)
    return {key: digest(value) for key, value in yaml.safe_load(process.stdout).items()}


def pin_refusal(name: str, folder: Path) -> Pin:
    """Return the exit code of a wrong command, and the keys that its message names."""
    words = shlex.split(name.replace("{run}", str(folder.parent / "refusals" / "run")))
    cheap = [] if {"plan", "resume"} & {word.partition("=")[0] for word in words} else ["plan=only"]
    process = launch(*words, *cheap, folder=folder)
    if process.returncode == 0:
        return {"failed": "the command was accepted"}
    message = process.stderr.rpartition("error: ")[2]
    typed = {word.partition("=")[0].lstrip("+") for word in words}
    keys = {*KEY.findall(message), *(typed & set(re.findall(r"[\w.@]+", message)))}
    return {"exit code": process.returncode, "keys": sorted(keys)}


def failure(process: subprocess.CompletedProcess[str]) -> Pin:
    """Return the pin of a process that should have succeeded, with its last line."""
    lines = process.stderr.strip().splitlines() or ["nothing on stderr"]
    return {"failed": f"exit code {process.returncode}: {lines[-1]}"}


def digest(value: object) -> str:
    """Return the SHA-256 of ``value`` as JSON with sorted keys."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def digest_of_tensors(path: Path) -> str:
    """Return the SHA-256 of the name, dtype, shape and bytes of each tensor in ``path``."""
    found = sha256()
    tensors = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    for name, tensor in sorted(tensors):
        found.update(f"{name} {tensor['dtype']} {tensor['shape']}\n".encode())
        found.update(tensor["data"])
    return found.hexdigest()


KINDS = {"runs": pin_run, "configs": pin_config, "refusals": pin_refusal}


def all_keys() -> list[str]:
    """Return KIND/NAME of all pins."""
    files = sorted(EXPERIMENTS.rglob("*.yaml"))
    lines = [line for line in REFUSALS.read_text().splitlines() if not line.startswith("#")]
    # Every third is enough. Words with spaces or quotes would have to be quoted for the shell.
    commands = [line.partition(" # ")[0] for line in lines[::3] if not re.search("[{'\"]", line)]
    return [
        *(f"runs/{name}" for name in RUNS),
        *(f"configs/{path.relative_to(EXPERIMENTS).with_suffix('')}" for path in files),
        *(f"refusals/{command}" for command in [*commands, *FROM_BEGUN]),
    ]


def find_pins(keys: Sequence[str]) -> Iterator[tuple[str, Pin]]:
    """Yield each of ``keys`` with what is found now."""
    with tempfile.TemporaryDirectory(prefix="pins-") as root, ThreadPoolExecutor(AT_ONCE) as pool:
        if any("{run}" in key for key in keys):
            begun = start_run(BEGUN, Path(root, "refusals", "run"))
            assert begun.returncode == STOPPED, begun.stderr

        def find(number: int) -> Pin:
            kind, _, name = keys[number].partition("/")
            folder = Path(root, str(number))
            folder.mkdir()
            began = time.monotonic()
            pin = KINDS[kind](name, folder)
            sys.stderr.write(f"{time.monotonic() - began:3.0f} s  {keys[number]}\n")
            shutil.rmtree(folder)
            return pin

        yield from zip(keys, pool.map(find, range(len(keys))), strict=True)


def write(file: Path, pins: Mapping[str, Pin], found: Mapping[str, Pin]) -> int:
    """Write ``found`` beside the other ``pins`` of ``file``; return 1 if a pin failed, else 0."""
    failed = {key: pin["failed"] for key, pin in found.items() if "failed" in pin}
    for key, reason in failed.items():
        print(f"failed, not written: {key}: {reason}")
    kept = {key: pin for key, pin in {**pins, **found}.items() if key not in failed}
    file.write_text(json.dumps(kept, indent=1) + "\n")
    return int(bool(failed))


def compare(pins: Mapping[str, Pin], found: Iterable[tuple[str, Pin | None]]) -> int:
    """Print a line for each pin; None stands for a pin that is gone. Return the exit code."""
    states = Counter[str]()
    for key, pin in found:
        old, new = pins.get(key, {}), pin or {}
        parts = [part for part in {**old, **new} if old.get(part) != new.get(part)]
        state = "missing" if not (old and new) else "DIFFERENT" if parts else "equal"
        details = {"missing": "now" if old else "in the file", "DIFFERENT": ", ".join(parts)}
        detail = new.get("failed", details.get(state, ""))
        print(f"{state:<10} {key}  {detail}".rstrip(), flush=True)
        states[state] += 1
    print(", ".join(f"{count} {state}" for state, count in states.items()))
    return int(set(states) != {"equal"})


def main() -> int:
    """Write or compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["write", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--names", nargs="+", default=[], help="such as smoke, of the pin runs/smoke"
    )
    options = parser.parse_args()
    pins = json.loads(options.file.read_text()) if options.file.exists() else {}
    current = all_keys()
    parts = {key: key.partition("/") for key in dict.fromkeys([*current, *pins])}
    chosen = [key for key, (kind, _, _) in parts.items() if kind in options.only]
    if options.names:
        chosen = [key for key in chosen if parts[key][2] in options.names]
    if unknown := set(options.names) - {parts[key][2] for key in chosen}:
        parser.error(f"no pin has the name {', '.join(sorted(unknown))}")
    found = find_pins([key for key in chosen if key in current])
    if options.action == "write":
        return write(options.file, pins, dict(found))
    return compare(pins, chain(found, ((key, None) for key in chosen if key not in current)))


if __name__ == "__main__":
    sys.exit(main())
