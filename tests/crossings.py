"""Cross random pairs of settings in runs of two steps, and check what holds for any one run.

    python -m tests.crossings [--seed S] [--pairs N] [--folder FOLDER]     (make soak)

Pairs are drawn from the settings of crossings.txt until N of them compose; those that are refused
are listed with the reason. For each pair:

- a run that is killed in its second step and resumed equals the uninterrupted run, bit for bit;
- with one update per rollout its ratio is 1, and the KL to the reference is 0 in the first step;
- micro-batches of 1 and of 4 give equal metrics of the first step, up to rounding;
- all metrics are finite; ``rlhf_lab.verify`` and ``rlhf.report`` pass.
"""

import argparse
import math
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from rlhf.gpu_check.runs import differing_files, metrics_without_times
from tests.forked_process import run_program
from tests.runs import DETERMINED, EPISODES, KEEP_ALL, ROOT, python, unfinished_copy

SETTINGS = Path(__file__).with_name("crossings.txt")
PAIRS_PER_PROCESS = 5
SECONDS = 1800  # for all pairs of a process
STOPPED = 130  # exit code of a run that checkpoint.stop_after stops
TOLERANCE = 1e-4  # largest difference that is rounding, absolute and relative

# SFT is long enough for some responses to end. PPO has one update per rollout.
BASE = (
    """experiment=smoke plan=off hardware.dtype=fp32 hardware.cores_per_rank=1 ppo.steps=2
    ppo.rollout_batch_size=8 ppo.mini_batch_size=8 ppo.ppo_epochs=1 ppo.micro_batch_size=4
    ppo.eval_prompts=4 rollout.max_response_tokens=8 checkpoint.every_steps=1""".split()
    + KEEP_ALL
)
SOURCE = """experiment=smoke plan=off hardware.dtype=fp32 hardware.cores_per_rank=1 data.size=600
    model.vocab_size=400 sft.batch_size=16 sft.epochs=4 sft.lr=1e-2 ppo.steps=1""".split()
REWARD = ["reward.batch_size=16", "reward.epochs=0.2"]
# Metrics of an update that is the first on its rollout.
FIRST_UPDATE = {"ppo/ratio_mean": 1.0, "ppo/ratio_max": 1.0}
FIRST_UPDATE |= {"ppo/clipfrac": 0.0, "ppo/approx_kl": 0.0}


class Setting(NamedTuple):
    """Words of a command, and the checks that do not hold with them."""

    words: tuple[str, ...]
    exempt: frozenset[str]

    @property
    def keys(self) -> set[str]:
        """Return the keys and groups that the words set."""
        return {key_of(word) for word in self.words}


Pair = tuple[Setting, Setting]


def key_of(word: str) -> str:
    """Return the key or the group that an override sets."""
    return word.lstrip("+").partition("=")[0]


def read_settings() -> list[Setting]:
    """Return the settings of crossings.txt."""
    found = []
    for line in SETTINGS.read_text().splitlines():
        if not line.startswith("#"):
            words, _, exempt = line.replace("EPISODES", shlex.join(EPISODES)).partition(" # ")
            found.append(Setting(tuple(shlex.split(words)), frozenset(exempt.split())))
    return found


def draw_pairs(seed: int) -> list[Pair]:
    """Return all pairs of settings without a common key, in an order that ``seed`` determines."""
    pairs = [pair for pair in combinations(read_settings(), 2) if not pair[0].keys & pair[1].keys]
    random.Random(seed).shuffle(pairs)
    return pairs


class Ended(NamedTuple):
    """A program that has ended: its exit code and what it printed."""

    code: int
    output: str

    @property
    def complaint(self) -> str:
        """Return the last error that was printed, or the last line."""
        last = " ".join(self.output.rpartition("error: ")[2].split())
        return f"exit code {self.code}: {last[-600:]}"


def call(*words: object, folder: Path) -> Ended:
    """Run ``python words`` within this process, which takes half the time of a new one."""
    from hydra.core.global_hydra import GlobalHydra

    variables, path, standard = dict(os.environ), list(sys.path), [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            os.chdir(folder)
            run_program([str(word) for word in words])
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException:
            code = 1
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in enumerate(standard, start=1):
                os.dup2(copy, number)
                os.close(copy)
            os.environ.clear()
            os.environ.update(variables)
            sys.path[:] = path
            GlobalHydra.instance().clear()
        file.seek(0)
        return Ended(code, file.read().decode(errors="replace"))


def is_of_source(word: str) -> bool:
    """Return True if a run that starts from another takes this key from the other run."""
    return word.startswith(DETERMINED) and not word.startswith("data.ptx")


def source_run(words: Sequence[str], folder: Path) -> Path:
    """Return a run with ``words``, from which pairs take the phases before PPO."""
    is_game = any(word.startswith("environment=") for word in words)
    phases = EPISODES if is_game else REWARD
    run_dir = folder / "sources" / ("_".join(sorted(words)) or "plain")
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{run_dir}.lock"):
        if not (run_dir / "result.json").exists():
            chosen = without_repeated_keys([*SOURCE, *phases, *words])
            ended = call(ROOT / "launch.py", *chosen, f"run_dir={run_dir}", folder=folder)
            assert ended.code == 0, ended.output
    return run_dir


def without_repeated_keys(words: Sequence[str]) -> list[str]:
    """Return the last word for each key."""
    return list({key_of(word): word for word in words}.values())


def cross(pair: Pair, name: str, folder: Path, *, replays: str) -> str:
    """Run a pair below ``folder``; return "equal", the reason of a refusal, or what is wrong."""
    given = [word for setting in pair for word in setting.words]
    exempt = pair[0].exempt | pair[1].exempt
    source = source_run([word for word in given if is_of_source(word)], folder)
    words = [f"from_run={source}", *BASE, *(word for word in given if not is_of_source(word))]

    def launch(*more: str) -> Ended:
        return call(ROOT / "launch.py", *without_repeated_keys([*words, *more]), folder=folder)

    whole, killed, small = (folder / f"{name}-{kind}" for kind in ("whole", "killed", "small"))
    ended = launch(f"run_dir={whole}")
    if ended.code == 2 and "Traceback" not in ended.output:
        return f"refused: {ended.complaint.partition(': ')[2]}"
    if ended.code:
        return f"FAILED: {ended.complaint}"
    found = [*wrong_metrics(whole, exempt)]
    unfinished_copy(whole, killed, "ppo", after_step=1)
    ended = call(ROOT / "launch.py", f"resume={killed}", folder=folder)
    if ended.code:
        found.append(f"killed: {ended.complaint}")
    elif different := [x for x in differing_files(whole, killed) if "tfevents" not in x]:
        found.append(f"resumed: {', '.join(different)}")
    if "micro" not in exempt:
        first_step = ["checkpoint.stop_after=ppo/1", "ppo.micro_batch_size=1"]
        ended = launch(f"run_dir={small}", *first_step)
        if ended.code in (0, STOPPED):
            found += different_metrics(whole, small)
        else:
            found.append(f"micro-batch 1: {ended.complaint}")
    for program in (["rlhf_lab.verify", "--replay", replays], ["rlhf.report"]):
        trust = (
            ["--trust-code"]
            if "run_code" in " ".join(given) and "rlhf_lab.verify" in program
            else []
        )
        ended = call("-m", *program, whole, *trust, folder=folder)
        if ended.code:
            found.append(f"{' '.join(program)}: {ended.output}")
    if found:
        return f"WRONG: {'; '.join(found)}"
    for run_dir in (whole, killed, small):
        shutil.rmtree(run_dir, ignore_errors=True)
    return "equal"


def ppo_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of PPO by line, without times."""
    return [line for line in metrics_without_times(run_dir) if line["phase"] == "ppo"]


def wrong_metrics(run_dir: Path, exempt: frozenset[str]) -> Iterator[str]:
    """Yield metrics that are not finite, and those that differ from what they must be."""
    for line in ppo_lines(run_dir):
        step = line["step"]
        wanted = {} if "ratio" in exempt else dict(FIRST_UPDATE)
        if step == 1 and "kl" not in exempt:
            wanted["ppo/kl_to_reference"] = 0.0
        for name, value in line.items():
            if isinstance(value, float) and not math.isfinite(value):
                yield f"step {step}: {name}={value}"
            elif name in wanted and abs(value - wanted[name]) > TOLERANCE:
                yield f"step {step}: {name}={value} instead of {wanted[name]}"


def different_metrics(one: Path, other: Path) -> Iterator[str]:
    """Yield the metrics of the first step, and before, that differ by more than rounding."""
    for ours, theirs in zip(ppo_lines(one), ppo_lines(other), strict=False):
        if ours["step"] > 1:
            return
        for name in ours.keys() | theirs.keys():
            pair = (ours.get(name, math.nan), theirs.get(name, math.nan))
            if not isinstance(pair[0], float):
                continue
            if not math.isclose(*pair, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                yield f"micro-batch 1, step {ours['step']}: {name}={pair[1]} instead of {pair[0]}"


def prepare(folder: Path) -> None:
    """Write the files that settings name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.txt").write_text("\n\n".join(f"text number {n}" for n in range(60)))
    shutil.copy(ROOT / "examples" / "my_rewards.py", folder)


def cross_part(
    part: int, parts: int, *, seed: int, count: int, folder: Path, replays: str
) -> Iterator[str]:
    """Cross every ``parts``-th pair until ``count`` were not refused; yield a line for each."""
    for number, pair in enumerate(draw_pairs(seed)[part::parts]):
        began = time.monotonic()
        answer = cross(pair, f"{part}-{number}", folder, replays=replays)
        words = " x ".join(shlex.join(setting.words) for setting in pair)
        yield f"{answer} ({time.monotonic() - began:.0f} s): {words}"
        count -= not answer.startswith("refused")
        if not count:
            return


def cross_in_process(
    part: int, parts: int, *, seed: int, count: int, folder: Path, replays: str
) -> list[str]:
    """Return the lines of ``cross_part`` in a process of its own."""
    words = ["--seed", seed, "--pairs", count, "--folder", folder, "--part", part, parts]
    words += ["--replay", replays]
    ended = python("-m", "tests.crossings", *words, timeout=SECONDS)
    failed = [f"FAILED: part {part}: {ended.stderr}"] if ended.returncode else []
    return ended.stdout.splitlines() + failed


def main() -> int:
    """Cross the pairs in several processes, or one part of them in this; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--replay", default="1", help="of rlhf_lab.verify; none: quicker")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="crossings-"))
    prepare(folder)
    given = {"seed": options.seed, "folder": folder, "replays": options.replay}
    if options.part:
        for line in cross_part(*options.part, count=options.pairs, **given):
            print(line, flush=True)
        return 0
    parts = math.ceil(options.pairs / PAIRS_PER_PROCESS)
    counts = [len(range(part, options.pairs, parts)) for part in range(parts)]
    answers: Counter[str] = Counter()
    with ThreadPoolExecutor(options.at_once) as pool:
        started = [
            pool.submit(cross_in_process, part, parts, count=count, **given)
            for part, count in enumerate(counts)
        ]
        for each in as_completed(started):
            print("\n".join(each.result()), flush=True)
            answers.update(re.split(r"\W", line, maxsplit=1)[0] for line in each.result())
    print(", ".join(f"{count} {answer}" for answer, count in answers.items()))
    return int(bool(set(answers) - {"equal", "refused"}))


if __name__ == "__main__":
    sys.exit(main())
