"""Cheats to plant in the folder of a finished run, which ``python -m rlhf_lab.verify`` must find.

Each is a function of the folder and of random numbers, which choose the file, the line and the size
of the change. ``CHEATS`` names the check that finds it from the files alone; the forgeries make all
hashes fit, and only what is computed again finds them.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

from safetensors.torch import load_file, save_file

from rlhf.base.hashing import sha256_of
from rlhf.base.stored_files import ATTEMPTS, file_identity
from rlhf.run.finished_phase import mark_lines

Cheat = Callable[[Path, Random], object]
Row = dict[str, Any]
METRICS, SAMPLES, RESULT = "metrics.jsonl", "samples.jsonl", "result.json"


def copy_run(run_dir: Path, target: Path) -> Path:
    """Copy a run, whose large files may be links: cheats replace a file and never write in it."""
    return Path(shutil.copytree(run_dir, target, copy_function=shutil.copy2))


def edit_json(path: Path, change: Callable[[Row], object]) -> None:
    """Change the object in a JSON file as its writer would have written it."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=2) + "\n")


def edit_log(name: str, change: Callable[[list[Row], Random], object]) -> Cheat:
    """Return a cheat that changes the lines of a log."""

    def plant(run: Path, draw: Random) -> None:
        before = (run / name).read_text()
        rows = [json.loads(line) for line in before.splitlines()]
        assert written(rows) == before, "nothing else changes"
        change(rows, draw)
        (run / name).write_text(written(rows))

    return plant


def written(rows: list[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def with_hashes(plant: Cheat) -> Cheat:
    """Return the cheat that also makes all hashes fit."""
    return lambda run, draw: (plant(run, draw), forge_hashes(run))


def raised(row: Row, draw: Random) -> Row:
    """Return a line of a log with one of its numbers raised."""
    names = [n for n, v in row.items() if isinstance(v, float) and "seconds" not in n]
    name = draw.choice(names)
    return row | {name: row[name] + draw.uniform(0.01, 1)}


def raise_a_line(rows: list[Row], draw: Random) -> None:
    place = draw.randrange(len(rows))
    rows[place] = raised(rows[place], draw)


def delete_a_line(rows: list[Row], draw: Random) -> None:
    del rows[draw.randrange(len(rows))]


def swap_lines(rows: list[Row], draw: Random) -> None:
    """Exchange two lines of one phase: lines of two phases may stand in any order."""
    phases = [row["phase"] for row in rows]
    phase = draw.choice(sorted({each for each in phases if phases.count(each) > 1}))
    one, two = draw.sample([place for place, each in enumerate(phases) if each == phase], 2)
    rows[one], rows[two] = rows[two], rows[one]


def append_a_line(rows: list[Row], draw: Random) -> None:
    rows.append(raised(rows[-1], draw))


def edit_answer(rows: list[Row], draw: Random) -> None:
    draw.choice(rows)["response"] = " I am very glad to help."


def judge_better(rows: list[Row], draw: Random) -> None:
    for row in draw.sample(rows, 3):
        row["gold"] = 1.25


def set_key(key: str, value: object) -> Cheat:
    """Change the first value of a key in config.yaml."""

    def plant(run: Path, _: Random) -> None:
        text = (run / "config.yaml").read_text()
        changed = re.sub(rf"^( *{key}): .*$", rf"\1: {value}", text, count=1, flags=re.MULTILINE)
        assert changed != text, key
        (run / "config.yaml").write_text(changed)

    return plant


def swap_seed(run: Path, draw: Random) -> None:
    set_key("seed", draw.randrange(100, 10_000))(run, draw)


def edit_command(run: Path, draw: Random) -> None:
    command = (run / "command.txt").read_text().replace("data.size=600", "data.size=60000")
    (run / "command.txt").write_text(command.strip() + f" seed={draw.randrange(100, 999)}\n")


def scale(path: Path, factor: float) -> None:
    """Change weights, in a file of the same size."""
    tensors = {name: tensor * factor for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def replace_model(run: Path, draw: Random) -> None:
    scale(draw.choice(sorted(run.glob("*/*/*.safetensors"))), 1.001)


def edit_model_config(run: Path, draw: Random) -> None:
    path = draw.choice(sorted(run.glob("*/*/generation_config.json")))
    edit_json(path, lambda content: content.update(temperature=0.1))


def raise_objective(run: Path, draw: Random) -> None:
    better = draw.uniform(0.01, 0.3)
    edit_json(run / RESULT, lambda found: found.update(objective=found["objective"] + better))


def raise_result(run: Path, draw: Random) -> None:
    def change(found: dict[str, Any]) -> None:
        ppo = found["phases"]["ppo"]
        name = draw.choice(["score_after", "gold_after", "kl_to_reference", "exact_after"])
        ppo[name] += 0.125
        found["objective"] = ppo["gold_after"]

    edit_json(run / RESULT, change)


def raise_result_of_phase(run: Path, draw: Random) -> None:
    raise_result(run, draw)
    whole = json.loads((run / RESULT).read_text())["phases"]["ppo"]
    edit_json(run / "ppo" / RESULT, lambda found: found.update(whole))


def raise_held_out(run: Path, draw: Random) -> None:
    def change(found: dict[str, Any]) -> None:
        values = found["after"]["gold/gold"]
        values[draw.randrange(len(values))] += 0.5

    edit_json(run / "ppo" / "held_out.json", change)


def edit_manifest(run: Path, draw: Random) -> None:
    """Edit a log, and make the manifests fit."""
    edit_log(METRICS, raise_a_line)(run, draw)
    renew_manifests(run)


def edit_attempts(run: Path, _: Random) -> None:
    """Claim another machine, on which numbers would be rounded differently."""
    claim = {"device": "NVIDIA B300", "threads": "96"}
    change = lambda found: found["attempts"][0]["environment"].update(claim)  # noqa: E731
    edit_json(run / ATTEMPTS, change)


def swap_phases(run: Path, _: Random) -> None:
    """Exchange the models of PPO's actor and of SFT, with manifests that fit."""
    paths = [run / "sft/model/model.safetensors", run / "ppo/actor/model.safetensors"]
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, reversed(contents), strict=True):
        path.unlink()
        path.write_bytes(content)
    renew_manifests(run)


# The check that finds the cheat, and the cheat.
CHEATS: dict[str, tuple[str, Cheat]] = {
    "a metric is raised": ("logs", edit_log(METRICS, raise_a_line)),
    "a line of metrics is gone": ("logs", edit_log(METRICS, delete_a_line)),
    "two lines of metrics change places": ("logs", edit_log(METRICS, swap_lines)),
    "a line of metrics is added": ("logs", edit_log(METRICS, append_a_line)),
    "a score of an answer is raised": ("logs", edit_log(SAMPLES, raise_a_line)),
    "an answer is gone": ("logs", edit_log(SAMPLES, delete_a_line)),
    "an answer is another": ("logs", edit_log(SAMPLES, edit_answer)),
    "the seed is another": ("files", swap_seed),
    "a learning rate is another": ("files", set_key("actor_lr", 0.5)),
    "a typed key is another": ("command", set_key("vocab_size", 500)),
    "the command is another": ("files", edit_command),
    "a model is another": ("files", replace_model),
    "a model samples in another way": ("files", edit_model_config),
    "the objective is higher": ("results", raise_objective),
    "a result is better": ("results", raise_result),
    "a result and that of the phase are better": ("files", raise_result_of_phase),
    "a held-out prompt is answered better": ("files", raise_held_out),
    "a manifest fits the edited metrics": ("files", edit_manifest),
    "another machine is claimed": ("files", edit_attempts),
    "the models of two phases change places": ("files", swap_phases),
    "the judge's ratings are better, and all hashes fit": (
        *("samples", with_hashes(edit_log(SAMPLES, judge_better))),
    ),
}


def renew_manifests(run: Path, phases: Iterable[str] = ("sft", "reward", "ppo", "dpo")) -> None:
    """Write into the manifests the hashes of the files and of the lines as they are now."""
    for phase in phases:
        path = run / phase / "manifest.json"
        if not path.exists():
            continue
        manifest = json.loads(path.read_text())
        manifest["files"] = {name: file_identity(run / phase / name) for name in manifest["files"]}
        for name in manifest["lines"]:
            manifest["lines"][name] = " ".join(mark_lines(run / name, phase))
        path.write_text(json.dumps(manifest, indent=2) + "\n")


def forge_hashes(run: Path) -> None:
    """Make every hash of the run fit its files, as a cheat who knows them all would."""

    def of_start(found: dict[str, Any]) -> None:
        files = found["attempts"][-1]["files"]
        files.update({name: hash_of(run / name) for name, kept in files.items() if kept})

    def of_result(found: dict[str, Any]) -> None:
        found["records"] = {name: hash_of(run / name) for name in found["records"]}

    renew_manifests(run)
    edit_json(run / ATTEMPTS, of_start)
    edit_json(run / RESULT, of_result)


def hash_of(path: Path) -> str:
    return sha256_of(path.read_bytes())


def better_curve(rows: list[Row], draw: Random) -> None:
    """Raise a metric in every step of a phase."""
    phase = draw.choice(sorted({row["phase"] for row in rows}))
    name = {"sft": "sft/loss", "reward": "reward/loss", "ppo": "ppo/score_mean"}[phase]
    better = draw.uniform(0.01, 0.2)
    for row in rows:
        if name in row:
            row[name] += better


def better_answers(rows: list[Row], draw: Random) -> None:
    for row in draw.sample([row for row in rows if row["step"] == rows[-1]["step"]], 2):
        row["score"] += 1


def claim_seed(run: Path, draw: Random) -> None:
    """Claim another seed, also in the command."""
    seed = draw.randrange(100, 1000)
    set_key("seed", seed)(run, draw)
    command = (run / "command.txt").read_text().strip()
    (run / "command.txt").write_text(f"{command} seed={seed}\n")


def replace_policy(run: Path, _: Random) -> None:
    scale(run / "ppo" / "actor" / "model.safetensors", 1.02)


forge_answers = with_hashes(edit_log(SAMPLES, better_answers))
# Only what is computed again finds these.
FORGERIES: dict[str, Cheat] = {
    "a curve is better": with_hashes(edit_log(METRICS, better_curve)),
    "the policy is another": with_hashes(replace_policy),
    "the last answers score higher": forge_answers,
    "the seed is claimed": with_hashes(claim_seed),
}
