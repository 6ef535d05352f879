"""Damaged entries of the store of phases, which are never used and never in the way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from rlhf.base.errors import CheckpointError
from rlhf.base.manifest import folder_identities
from rlhf.config.choices import Phase
from rlhf.options.phase_store.__main__ import main
from rlhf.options.phase_store.phase_store import PhaseStore
from rlhf.run.finished_phase import (
    NOT_LISTED,
    copy_phase_lines,
    finish_phase,
    iterate_metrics,
    link_phase,
)
from tests.fuzz.case import Case

KEY = "0123456789abcdef"
JSON: tuple[str, ...] = (
    "",
    "null",
    "[]",
    "{}",
    "5",
    '{"files": 1}',
    '{"files": {}, "logs": 3}',
    "{",
    "[" * 50_000,
)
JSON += ('{"files": {"../../x": [0, ""]}, "logs": {}}', '{"files": [], "logs": {}}', "\x00\xff")
JSON += ('{"reused_from": 5}', '{"reused_from": "\\u001b]0;x\\u0007"}', "1" * 5000)
JSON += ('{"files": {"model/model.safetensors": []}, "logs": {"metrics.jsonl": []}}',)
Change = Callable[[Random, Path], object]


def cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield entries with one to three damages each."""
    while True:
        store = PhaseStore(folder / "store", max_gib=1)
        run_dir = trained(folder / "run", draw.randbytes(2000))
        store.put(KEY, Phase.sft, run_dir)
        names = draw.choices(sorted(CHANGES), k=draw.randint(1, 3))
        for name in names:
            CHANGES[name](draw, store.folder / KEY)
        yield Case("+".join(names), partial(use, store, run_dir, folder), must_refuse=True)
        shutil.rmtree(folder)


def trained(run_dir: Path, weights: bytes) -> Path:
    """Make a run that has finished SFT."""
    (run_dir / "sft" / "model").mkdir(parents=True)
    (run_dir / "sft" / "model" / "model.safetensors").write_bytes(weights)
    (run_dir / "sft" / "model" / "config.json").write_text('{"hidden_size": 32}')
    for name in ("metrics", "samples"):
        lines = [json.dumps({"phase": "sft", "step": step, "sft/loss": 2.5}) for step in (1, 2)]
        (run_dir / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    finish_phase(run_dir, Phase.sft, {"perplexity_after": 2.0, "seconds": 1.0})
    return run_dir


def use(store: PhaseStore, run_dir: Path, folder: Path) -> None:
    """Do with the entry what runs and the list do; a damage that was found is refused."""
    files = json.loads((run_dir / "sft" / "manifest.json").read_text())["files"]
    trained_files = {name: files[name] for name in files if name.startswith("model/")}
    said: list[str] = []
    with store.lock(KEY):
        entry = store.find(KEY, Phase.sft, said.append)
        if entry is not None:
            list(iterate_metrics(entry, Phase.sft))
            (folder / "taker").mkdir()
            copy_phase_lines(entry, Phase.sft, folder / "taker", "samples.jsonl")
            link_phase(entry, Phase.sft, folder / "taker", reused_from="a")
            if folder_identities(folder / "taker" / "sft", skip=NOT_LISTED) == trained_files:
                said.append("harmless: what was taken is what was trained")
        elif not said:
            said.append("there is no entry")
        again = trained(folder / "again", bytes(2000))
        store.put(KEY, Phase.sft, again)
        assert store.find(KEY, Phase.sft, said.append) is not None, said
    os.environ["RLHF_CACHE"] = str(folder)
    store.folder.rename(folder / "phases")
    assert main([]) == 0
    assert main(["clear"]) == 0
    if said:
        raise CheckpointError("; ".join(said))


def _a_file(draw: Random, entry: Path, *, of: str = "") -> Path | None:
    files = sorted(each for each in entry.rglob("*") if each.is_file() and each.name.endswith(of))
    return draw.choice(files) if files else None


def _flip(draw: Random, entry: Path, *, of: str = "") -> None:
    if (path := _a_file(draw, entry, of=of)) is None or not path.stat().st_size:
        return
    content = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 20)):
        content[draw.randrange(len(content))] ^= draw.randint(1, 255)
    path.write_bytes(content)


def _truncate(draw: Random, entry: Path) -> None:
    if (path := _a_file(draw, entry)) is not None:
        os.truncate(path, draw.randrange(path.stat().st_size + 1))


def _remove(draw: Random, entry: Path) -> None:
    if (path := _a_file(draw, entry)) is not None:
        path.unlink()


def _add(draw: Random, entry: Path) -> None:
    name = draw.choice(["adapter_config.json", "model.safetensors.index.json", "pytorch_model.bin"])
    if (entry / "sft" / "model").is_dir():
        (entry / "sft" / "model" / name).write_bytes(draw.randbytes(10))


def _json(draw: Random, entry: Path) -> None:
    if (path := _a_file(draw, entry, of=".json")) is not None:
        path.write_bytes(draw.choice(JSON).encode("latin-1"))


def _link(draw: Random, entry: Path) -> None:
    if (path := _a_file(draw, entry)) is not None:
        path.unlink()
        path.symlink_to(draw.choice(["/dev/zero", "/etc/passwd", "nowhere", path.name]))


def _pipe(draw: Random, entry: Path) -> None:
    if (path := _a_file(draw, entry)) is not None:
        path.unlink()
        os.mkfifo(path)


def _folder(draw: Random, entry: Path) -> None:
    if (path := _a_file(draw, entry)) is not None:
        path.unlink()
        path.mkdir()


def _mode(draw: Random, entry: Path) -> None:
    place = draw.choice([entry, entry / "sft", entry / "sft" / "manifest.json"])
    if place.exists():
        place.chmod(draw.choice([0o777, 0o666, 0o002, 0o757]))


def _owner(draw: Random, entry: Path) -> None:
    place = draw.choice([entry, entry / "sft", entry / "sft" / "manifest.json"])
    if place.exists() and os.getuid() == 0:  # only root can give files away
        os.chown(place, draw.randint(1000, 60_000), -1)


def _leavings(draw: Random, entry: Path) -> None:
    for name in (f".{entry.name}.building", f".{draw.randint(0, 99)}.building"):
        (entry.parent / name / "sft").mkdir(parents=True, exist_ok=True)


CHANGES: dict[str, Change] = {
    "flipped weights": partial(_flip, of=".safetensors"),
    "flipped": _flip,
    "truncated": _truncate,
    "removed": _remove,
    "added": _add,
    "other JSON": _json,
    "a link": _link,
    "a pipe": _pipe,
    "a folder": _folder,
    "a mode": _mode,
    "an owner": _owner,
    "leavings": _leavings,
}
