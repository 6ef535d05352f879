"""Damaged files of the store of phases, of a search, of a cache of tokens and of an ensemble."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlhf.base.errors import CheckpointError
from rlhf.base.stored_files import file_identities
from rlhf.config.choices import Phase
from rlhf.data.records import Record
from rlhf.data.splits import PhaseData
from rlhf.data.tokens import Limit, tokenise
from rlhf.jobs.search import JOURNAL, open_study
from rlhf.jobs.search_command import Search, StudyConfig
from rlhf.models.build import build_scorer
from rlhf.models.sources import ModelSource
from rlhf.options.phase_store.__main__ import main
from rlhf.options.phase_store.phase_store import PhaseStore
from rlhf.run.finished_phase import NOT_LISTED, finish_phase, iterate_metrics, link_phase
from rlhf_lab.ensembles import CombineName
from rlhf_lab.ensembles.members import (
    MEMBERS_FILE,
    Combination,
    build_members,
    load_ensemble,
    save_members,
)
from tests.fuzz.case import Case
from tests.fuzz.mutations import mutate
from tests.models_on_disk import small_tokenizer, some_ids
from tests.options.trunk.test_trunk import deep_source

KEY = "0123456789abcdef"


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


# ---- the store of phases


def phase_cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield entries of the store of phases with one to three damages each."""
    while True:
        store = PhaseStore(folder / "store", max_gib=1)
        run_dir = trained(folder / "run", draw.randbytes(2000))
        store.put(KEY, Phase.sft, run_dir)
        entry, said = store.folder / KEY, []
        for _ in range(draw.randint(1, 3)):
            path = draw.choice(files_of(entry) or [entry])
            if path == entry or draw.random() < 0.2:
                path.chmod(0o666)
                said.append(f"{path.name}: everybody may write")
            else:
                said.append(mutate(draw, path))
        yield Case("; ".join(said), partial(use_entry, store, run_dir, folder), must_refuse=False)
        shutil.rmtree(folder)


def trained(run_dir: Path, weights: bytes) -> Path:
    """Make the directory of a run that has finished SFT."""
    (run_dir / "sft" / "model").mkdir(parents=True)
    (run_dir / "sft" / "model" / "model.safetensors").write_bytes(weights)
    (run_dir / "sft" / "model" / "config.json").write_text('{"hidden_size": 32}')
    for name in ("metrics", "samples"):
        lines = [json.dumps({"phase": "sft", "step": step, "sft/loss": 2.5}) for step in (1, 2)]
        (run_dir / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    finish_phase(run_dir, Phase.sft, {"perplexity_after": 2.0, "seconds": 1.0})
    return run_dir


def use_entry(store: PhaseStore, run_dir: Path, folder: Path) -> None:
    """Take the entry as a run does; what is taken must be what was trained."""
    files = json.loads((run_dir / "sft" / "manifest.json").read_text())["files"]
    trained_files = {name: files[name] for name in files if name.startswith("model/")}
    said: list[str] = []
    with store.entry_lock(KEY):
        entry = store.find(KEY, Phase.sft, said.append)
        if entry is not None:
            list(iterate_metrics(entry))
            (folder / "taker").mkdir()
            link_phase(entry, Phase.sft, folder / "taker", reused_from="a")
            taken = file_identities(folder / "taker" / "sft", skip=NOT_LISTED)
            assert taken == trained_files, "accepted in silence: other weights"
        store.put(KEY, Phase.sft, trained(folder / "again", bytes(2000)))
        assert store.find(KEY, Phase.sft, said.append) is not None, said
    os.environ["RLHF_CACHE"] = str(folder)
    store.folder.rename(folder / "phases")
    assert main([]) == main(["clear"]) == 0
    if said:
        raise CheckpointError("; ".join(said))


# ---- journals of a search


def searched(folder: Path) -> None:
    """Open the study twice, as a continued search does, and ask for a trial."""
    for _ in range(2):
        study = Search(StudyConfig(trials=9, maximize=["ppo.gold_after"]), [], [], folder)
        open_study(study).ask().suggest_float("sft.lr", 1e-5, 1e-3)


def journal_cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield journals of two trials with an odd line, or damaged in another way."""
    odd = [b"text", b"\0\0", b"[]", b"5", b"{}", b'{"op_code": "x"}', b'{"op_code": 99}', b"\xff"]
    odd += [b"[" * 50_000, b'{"op_code": 4}', b'{"op_code": 0, "worker_id": 5}', b"9" * 5000]
    while True:
        searched(folder)
        path = folder / JOURNAL
        if draw.random() < 0.5:
            yield Case(mutate(draw, path), partial(searched, folder), must_refuse=False)
            continue
        lines, line = path.read_bytes().splitlines(keepends=True), draw.choice(odd)
        lines.insert(draw.randrange(len(lines)), line + b"\n")
        path.write_bytes(b"".join(lines))
        yield Case(f"line {line[:20]!r}", partial(searched, folder))


# ---- caches of token ids

Sides = list[list[dict[str, object]]]


def read(cache: Path, phase: Phase) -> Sides:
    """Return the rows of both sides of a small data set, by way of the cache."""
    rows = [
        Record(prompt=f"What is {n}?", chosen=f" It is {n}.", rejected=" I do not know.")
        for n in range(6)
    ]
    data, limit = PhaseData(train=rows[:4], eval=rows[4:]), Limit("sft.max_tokens", 200)
    found = tokenise(data, phase, small_tokenizer(), limit=limit, cache_dir=cache)
    return [found.train[:], found.eval[:]]


def same(cache: Path, phase: Phase, whole: Sides) -> None:
    """Read the damaged entry; rows that are not those of the data are a fault."""
    assert read(cache, phase) == whole, "accepted in silence: other rows"


def token_cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield entries of which one file is damaged, or the two sides are exchanged."""
    while True:
        phase = draw.choice([Phase.sft, Phase.reward, Phase.ppo])
        whole = read(folder / "cache", phase)
        entry = next(path for path in (folder / "cache/tokens").iterdir() if path.is_dir())
        if draw.random() < 0.8:
            what = mutate(draw, draw.choice(files_of(entry)))
        else:
            (entry / "train").rename(folder / "moved")
            (entry / "eval").rename(entry / "train")
            (folder / "moved").rename(entry / "eval")
            what = "train and eval exchanged"
        yield Case(f"{phase}, {what}", partial(same, folder / "cache", phase, whole), False)
        shutil.rmtree(folder)


# ---- ensembles

GROWING: Any = SimpleNamespace(num_own_layers=lambda n: n // 2, combine=CombineName.mean)


@cache
def good_ensemble() -> Path:
    """Make a folder with an intact ensemble of three, once."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf-fuzz-"))
    scorer = build_scorer(deep_source("llama"), small_tokenizer(), seed=1)
    scorer.pretrained.save_pretrained(folder)
    save_members(folder, build_members(scorer, GROWING, seeds=[2, 3]), torch.zeros(3))
    return folder


def score(folder: Path) -> None:
    """Load an ensemble as a run does, and score with it."""
    source = ModelSource(key="reward_model.path", path=str(folder))
    scorer = build_scorer(source, small_tokenizer(), seed=1)
    three = Combination(3, CombineName.mean)
    assert load_ensemble(scorer, source, three)(some_ids()).isfinite().all()


WAYS = ("rename", "type", "shape", "poison", "add", "only", "drop")


def damage_ensemble(draw: Random, folder: Path, way: str, name: str) -> None:
    """Copy the intact ensemble to ``folder``, and damage its tensor ``name``."""
    shutil.copytree(good_ensemble(), folder, dirs_exist_ok=True)
    weights = {key: tensor.clone() for key, tensor in load_file(folder / MEMBERS_FILE).items()}
    match way:
        case "rename":
            new = ("x", "1.branch.blocks.abc.x", f"9{name}", name[2:], "\x1b[2J")
            weights[draw.choice(new)] = weights.pop(name)
        case "type":
            weights[name] = weights[name].to(draw.choice([torch.int8, torch.bool, torch.int64]))
        case "shape":
            weights[name] = torch.zeros(draw.choice([(), (0,), (7,), (3, 2), (1, 1, 1)]))
        case "poison":
            weights[name].view(-1)[0] = draw.choice([torch.nan, torch.inf, -torch.inf])
        case "add":
            weights[draw.choice([f"3{name[1:]}", "offset"])] = weights[name].clone()
        case "only":
            weights = {name: weights[name]}
        case _:
            del weights[name]
    save_file(weights, folder / MEMBERS_FILE)


def ensemble_cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield ensembles of which one tensor is damaged."""
    while True:
        way, name = (
            draw.choice(WAYS),
            draw.choice(sorted(load_file(good_ensemble() / MEMBERS_FILE))),
        )
        damage_ensemble(draw, folder, way, name)
        yield Case(f"{way} {name}", partial(score, folder))
