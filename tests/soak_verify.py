"""Plant 100 cheats in real runs, verify 30 honest runs, and count what is found.

    python -m tests.soak_verify [--folder FOLDER] [--part honest|cheats]     (make soak)

An honest run that is accused is a fault; so are two cheats of 100 that are not found.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

from rlhf_lab.verify import CheckState, read_checked_run, verify_run
from tests.cheats import CHEATS, FORGERIES, RESULT, Cheat, copy_run
from tests.runs import EPISODES, KEEP_ALL, ROOT, TINY_RUN, launch

MOST_MISSED = 1
DPO = ["phase=pipeline_dpo", "dpo.batch_size=16", "dpo.epochs=0.2", "dpo.eval_prompts=8"]
GROUPS = ["ppo.responses_per_prompt=2"]
STOPPED = ["checkpoint.stop_after=ppo/1"]
LOW = {"RLHF_MAX_CPU_ISA": "none", "ATEN_CPU_CAPABILITY": "default"}
JUDGE = (
    "rewards={vowels: {kind: function, function: 'my_rewards:vowels', run_code: true}, right: "
    "{kind: function, function: 'my_judge:right', run_code: true, weight: 0, sealed: auto, "
    "files: [right.txt]}}"
)
MY_JUDGE = """
WANTED = open("right.txt").read().split()

def right(prompts, responses):
    return [sum(word in response for word in WANTED) for response in responses]
"""
LOCAL = ["phase=pipeline_rule", "data=local", "data.path=mine.jsonl", "data.eval_path=held.jsonl"]
LOCAL = [*LOCAL, "data.size=0", JUDGE]

# Honest runs: words, and the words and the environment of a second start of the same folder.
HONEST: dict[str, tuple[Sequence[str], Sequence[str] | None, dict[str, str]]] = {
    **{f"seed {seed}": ([f"seed={seed}"], None, {}) for seed in (1, 2, 3, 4)},
    "digests": (["checkpoint.digest_every=1"], None, {}),
    "checkpoints": ([*KEEP_ALL, "checkpoint.every_steps=1", "ppo.steps=3"], None, {}),
    "best step": (["checkpoint.best=ppo/eval_score", "checkpoint.load_best=true",
                   "ppo.eval_every=1", "checkpoint.every_steps=1"], None, {}),
    "grpo": (["ppo.advantage_estimator=grpo", *GROUPS], None, {}),
    "moving average": (["ppo.ema_beta=0.9"], None, {}),
    "members": (["reward.members=2"], None, {}),
    "adapters": (["lora=all", "lora.roles=[actor,critic]"], None, {}),
    "bf16": (["hardware.dtype=bf16"], None, {}),
    "dpo": (DPO, None, {}),
    "sft": (["phase=sft"], None, {}),
    "a rule": (["phase=pipeline_rule", "rewards.ends={kind: stop}"], None, {}),
    "gold": (["phase=pipeline_rule", "model@reward_model=gold"], None, {}),
    "episodes": (EPISODES, None, {}),
    "samples": (["ppo.sample_every=1", "ppo.eval_every=1", "sft.eval_every=1"], None, {}),
    "stopped in ppo": ([*STOPPED], ["checkpoint.stop_after=null"], {}),
    "stopped in sft": (["checkpoint.stop_after=sft/2"], ["checkpoint.stop_after=null"], {}),
    "finished, started again": ([], ["alarms.mute=[length]"], {}),
    "from a run": (["phase=ppo", "from_run=FIRST", "ppo.kl_ctl=0.05"], None, {}),
    "from a run, again": (["phase=ppo", "from_run=FIRST", "ppo.steps=3"], None, {}),
    "reused phases": (["reuse.phases=always"], None, {}),
    "reused phases again": (["reuse.phases=always", "ppo.kl_ctl=0.05"], None, {}),
    "own data and judge": (LOCAL, None, {}),
    "another processor": ([], None, LOW),
    "another processor, dpo": (DPO, None, LOW),
    "two cores": (["hardware.cores_per_rank=2"], None, {}),
    "resumed on another processor": (STOPPED, ["checkpoint.stop_after=null"], LOW),
}  # fmt: skip


def write_own_files(folder: Path) -> None:
    """Write data, a reward and a judge beside the runs."""
    shutil.copy(ROOT / "examples" / "my_rewards.py", folder)
    (folder / "my_judge.py").write_text(MY_JUDGE)
    (folder / "right.txt").write_text("yes no\n")
    rows = [{"prompt": f"\n\nHuman: Is {i} + {i % 7} more than {i % 13}?\n\nAssistant:",
             "completion": f" yes {i % 5}"} for i in range(400)]  # fmt: skip
    for name, some in (("mine.jsonl", rows[:300]), ("held.jsonl", rows[300:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in some))


def run_honestly(folder: Path, name: str) -> Path:
    """Run, and perhaps resume, the honest run ``name``; return its directory."""
    words, again, environment = HONEST[name]
    run_dir = folder / name.replace(" ", "-").replace(",", "")
    if (run_dir / RESULT).exists():
        return run_dir
    first = folder / "seed-1"
    words = [word.replace("FIRST", str(first)) for word in words]
    stops = any("stop_after=" in word for word in words)
    how = {"popen": subprocess.Popen, **environment} if environment else {}  # torch reads it once
    launched = launch(*TINY_RUN, *words, f"run_dir={run_dir}", cwd=folder, **({} if again else how))
    assert launched.returncode == (130 if stops else 0), launched.stderr
    if again is not None:
        launched = launch(f"resume={run_dir}", *again, cwd=folder, **how)
        assert launched.returncode == 0, launched.stderr
    return run_dir


def outcomes(run_dir: Path, seed: int, *, replays: int = 1) -> dict[str, tuple[CheckState, str]]:
    """Verify a run; return the state of each check, and its first finding."""
    run = read_checked_run(run_dir, seed=seed, replays=replays, trusts_run=True)
    found = {}
    for name, state, findings in verify_run(run):
        found[name] = state, "; ".join(f"{each.place}: {each.text}" for each in findings[:2])
    return found


def count_accused(folder: Path, say: Callable[[str], None]) -> int:
    """Verify the honest runs; return how many are accused."""
    accused = 0
    for number, name in enumerate(HONEST):
        found = outcomes(run_honestly(folder, name), number)
        states = [state for state, _ in found.values()]
        accused += CheckState.differs in states
        odd = [f"{check} {state} ({text})" for check, (state, text) in found.items() if text]
        say(f"{'ACCUSED' if CheckState.differs in states else 'passes'}: {name}: {'; '.join(odd)}")
    say(f"{accused} of {len(HONEST)} honest runs accused")
    return accused


def change_file(name: str, change: Callable[[str], str]) -> Cheat:
    """Return a cheat that changes a file that the run was given."""

    def plant(run: Path, _: Random) -> None:
        inputs = json.loads((run / "inputs.json").read_text())
        (path,) = {path for files in inputs.values() for path in files if path.endswith(name)}
        Path(path).write_text(change(Path(path).read_text()))

    return plant


GIVEN: dict[str, Cheat] = {
    "the reward is another": change_file("my_rewards.py", lambda text: text + "\n# higher\n"),
    "the judge is another": change_file("my_judge.py", lambda text: text.replace("sum", "len")),
    "the judge's data is another": change_file("right.txt", lambda text: text + "maybe\n"),
    "the data is another": change_file("mine.jsonl", lambda text: text.replace("more", "less")),
    "held-out rows are trained on": change_file("mine.jsonl", lambda text: text + text[:200]),
    "held-out rows are others": change_file("held.jsonl", lambda text: text.replace("yes", "no")),
}


def replace_result(path: Path) -> Cheat:
    """Return a cheat that takes the result of another run."""
    return lambda run, _: shutil.copy(path, run / RESULT)


def planted(folder: Path, draw: Random) -> Iterator[tuple[str, Path]]:
    """Plant 100 cheats one after the other; yield the name of each and the run that has it."""
    bases = [run_honestly(folder, name) for name in ("seed 1", "digests", "seed 2")]
    own = run_honestly(folder, "own data and judge")
    copy = folder / "copy"

    def cheated(base: Path, plant: Cheat) -> Path:
        shutil.rmtree(copy, ignore_errors=True)
        plant(copy_run(base, copy), draw)
        return copy

    for turn in range(3):
        for name, (_, plant) in CHEATS.items():
            yield name, cheated(bases[turn], plant)
        for name, plant in GIVEN.items():
            run_dir = cheated(own, plant)
            yield name, run_dir
            write_own_files(folder)
        for name, plant in FORGERIES.items():
            yield name, cheated(bases[turn], plant)
        plant = replace_result(bases[turn - 1] / RESULT)
        yield "a copied result", cheated(bases[turn], plant)
    for number in range(4):
        yield "held-out rows with other punctuation", run_with_leak(folder, number)


def run_with_leak(folder: Path, number: int) -> Path:
    """Run SFT on data that has some held-out rows again, with other case or punctuation."""
    place = folder / f"leak-{number}"
    place.mkdir(exist_ok=True)
    write_own_files(place)
    held = (place / "held.jsonl").read_text().splitlines()[7 * number : 7 * number + 3]
    changes: list[Callable[[str], str]] = [
        str.upper, lambda row: row.replace("?", "!"),
        lambda row: row.replace("?", " ?"), lambda row: row.replace("Is", "IS,"),
    ]  # fmt: skip
    rows = [json.loads(row) for row in held]
    leaked = [row | {"prompt": "\n\nHuman: " + changes[number](row["prompt"][9:-13]) +
                     "\n\nAssistant:"} for row in rows]  # fmt: skip
    with (place / "mine.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in leaked)
    data = [f"data.path={place / 'mine.jsonl'}", f"data.eval_path={place / 'held.jsonl'}"]
    words = [*TINY_RUN, "phase=sft", "data=local", "data.size=0", *data]
    words.append(f"run_dir={place / 'run'}")
    launched = launch(*words, cwd=place)
    assert launched.returncode == 0, launched.stderr
    return place / "run"


def count_missed(folder: Path, say: Callable[[str], None]) -> int:
    """Plant the cheats and verify each; return how many are not found."""
    count = missed = 0
    for number, (name, run_dir) in enumerate(planted(folder, Random(0))):
        found = outcomes(run_dir, number)
        checks = [check for check, (state, _) in found.items() if state is CheckState.differs]
        count, missed = count + 1, missed + (not checks)
        say(f"{'found' if checks else 'MISSED'}: {name}: {', '.join(checks)}")
    say(f"{count - missed} of {count} cheats found")
    return missed


def main(arguments: Sequence[str]) -> int:
    """Return 1 if an honest run is accused, or too many cheats are missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keep the runs here; default: a temporary one")
    parser.add_argument("--part", choices=("honest", "cheats"), help="default: both")
    options = parser.parse_args(arguments)

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_own_files(folder)
        os.chdir(folder)  # where the runs begin, as relative paths in their commands need it
        accused = 0 if options.part == "cheats" else count_accused(folder, say)
        missed = 0 if options.part == "honest" else count_missed(folder, say)
    return int(accused > 0 or missed > MOST_MISSED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
