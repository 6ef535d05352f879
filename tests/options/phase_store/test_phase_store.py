"""The store of phases: keys change with what a phase depends on, and with nothing else."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from rlhf.options.phase_store.__main__ import main
from rlhf.options.phase_store.phase_store import PhaseStore, phase_key
from rlhf.run.finished_phase import finish_phase, iterate_metrics, link_phase
from rlhf.run.results import read_phase_result, write_json
from tests.conftest import Compose


def keys(compose: Compose, *overrides: str, data: str = "d", code: str = "c") -> list[str]:
    config = to_run_config(compose(list(overrides)))
    return [phase_key(config, p, data=data, code=code) for p in (Phase.sft, Phase.reward)]


WHAT_PHASES_READ = {  # words, and whether they change the keys of SFT and of the reward phase
    **dict.fromkeys(["ppo.kl_ctl=0.9", "rollout=hf", "name=other", "plan=off"], (False, False)),
    **dict.fromkeys(["seed=2", "sft.lr=1e-5", "data.size=700", "zero=stage2"], (True, True)),
    **dict.fromkeys(["hardware.dtype=fp32", "lora=default"], (True, True)),
    **dict.fromkeys(["rollout.temperature=0.5", "rollout.top_k=7"], (True, True)),
    "reward.lr=1e-5": (False, True),
    "checkpoint.best=sft/eval_loss checkpoint.load_best=true": (True, True),
    "checkpoint.best=sft/eval_loss checkpoint.patience=3": (True, True),
    "checkpoint.best=reward/eval_loss checkpoint.load_best=true": (False, True),
}


@pytest.mark.parametrize("words", WHAT_PHASES_READ)
def test_a_key_changes_with_what_its_phase_reads(compose: Compose, words: str) -> None:
    evaluates = ("sft.eval_every=2", "reward.eval_every=2")
    pairs = zip(keys(compose, *evaluates, *words.split()), keys(compose, *evaluates), strict=True)
    assert tuple(found != plain for found, plain in pairs) == WHAT_PHASES_READ[words]


def test_data_and_code_are_part_of_the_key(compose: Compose) -> None:
    found = {*keys(compose), *keys(compose, data="e"), *keys(compose, code="e")}
    assert len(found) == 6


def test_weights_that_a_phase_starts_from_are_part_of_the_key(
    compose: Compose, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"a")
    words = ("model=pretrained", f"model.path={tmp_path}")
    before = keys(compose, *words)
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert keys(compose, *words) != before


def run_with(tmp_path: Path, name: str, content: str) -> Path:
    run_dir = tmp_path / name
    (run_dir / "sft" / "model").mkdir(parents=True)
    (run_dir / "sft" / "state").mkdir()
    (run_dir / "sft" / "state" / "big").write_text("x")
    (run_dir / "sft" / "model" / "weights").write_text(content)
    lines = [
        {"phase": "sft", "step": 1, "sft/loss": 2.5},
        {"phase": "ppo", "step": 1, "ppo/kl_ctl": 1.0},
        {"phase": "sft", "step": 2, "sft/loss": None},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    finish_phase(run_dir, Phase.sft, {"steps": 2})
    return run_dir


def test_phase_comes_back_with_its_metrics_and_where_it_is_from(tmp_path: Path) -> None:
    run_dir, store = run_with(tmp_path, "one", "w"), PhaseStore(tmp_path / "store", max_gib=1)
    assert store.find("k", Phase.sft, print) is None
    store.put("k", Phase.sft, run_dir)
    entry = store.find("k", Phase.sft, print)
    assert entry is not None
    assert store.find("k", Phase.reward, print) is None
    other = tmp_path / "other"
    link_phase(entry, Phase.sft, other, reused_from="one")
    weights = other / "sft" / "model" / "weights"
    assert weights.read_text() == "w"
    assert weights.samefile(run_dir / "sft" / "model" / "weights"), "one copy on the disk"
    assert not (other / "sft" / "state").exists()
    assert read_phase_result(other, Phase.sft) == {"reused_from": str(run_dir), "steps": 2}
    (first, second) = iterate_metrics(entry)
    assert first == ("sft", 1, {"sft/loss": 2.5})
    assert second[:2] == ("sft", 2)
    assert math.isnan(second[2]["sft/loss"])


def test_file_systems_without_links_get_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(source: str, target: str) -> None:
        raise OSError(18, "cross-device link", source, target)

    monkeypatch.setattr(os, "link", no_link)
    run_dir = run_with(tmp_path, "one", "w")
    link_phase(run_dir, Phase.sft, tmp_path / "other", reused_from="one")
    copy = tmp_path / "other" / "sft" / "model" / "weights"
    assert copy.read_text() == "w"
    assert not copy.samefile(run_dir / "sft" / "model" / "weights")


def test_phases_used_least_recently_are_removed_above_the_limit(tmp_path: Path) -> None:
    store = PhaseStore(tmp_path / "store", max_gib=2.5 * 1500 / 2**30)
    for number, name in enumerate("abc"):
        store.put(name, Phase.sft, run_with(tmp_path, name, "w" * 1000))
        os.utime(store.folder / name, (number, number))
        if name == "b":
            assert store.find("a", Phase.sft, print) is not None  # used now
    assert {entry.key for entry in store.entries()} == {"a", "c"}
    assert (tmp_path / "b" / "sft" / "model" / "weights").exists(), "the run keeps its own"


def test_store_is_listed_and_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a result says cannot command the terminal."""
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path))
    assert main([]) == 0
    assert capsys.readouterr().out == f"0 phases in {tmp_path / 'phases'}\n"
    store = PhaseStore(max_gib=1)
    store.put("k", Phase.sft, run_with(tmp_path, "one", "w"))
    assert main([]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("k  sft     ")
    assert first.endswith(str(tmp_path / "one"))
    assert last == f"1 phases in {tmp_path / 'phases'}"
    write_json(store.folder / "k" / "sft" / "result.json", {"reused_from": "\x1b]0;t\x07\nx"})
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 2
    assert main(["clear"]) == 0
    assert PhaseStore(max_gib=1).entries() == []
    assert main(["drop"]) == 2


def stored(tmp_path: Path) -> tuple[PhaseStore, Path]:
    store = PhaseStore(tmp_path / "store", max_gib=1)
    store.put("k", Phase.sft, run_with(tmp_path, "one", "w" * 100))
    return store, store.folder / "k"


def flip(path: Path) -> None:
    path.write_bytes(bytes(each ^ 1 for each in path.read_bytes()))


def change_owner(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a folder to another user")
    os.chown(path, 12_345, 12_345)


DAMAGES: Mapping[str, Callable[[Path], object]] = {
    "weights": lambda entry: flip(entry / "sft" / "model" / "weights"),
    "metrics": lambda entry: (entry / "metrics.jsonl").write_text(""),
    "no manifest": lambda entry: (entry / "sft" / "manifest.json").unlink(),
    "no result": lambda entry: (entry / "sft" / "result.json").write_text(""),
    "world can write": lambda entry: entry.chmod(0o777),
    "another user's": change_owner,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_entry_that_is_damaged_or_may_be_is_not_used(damage: str, tmp_path: Path) -> None:
    store, entry = stored(tmp_path)
    assert store.find("k", Phase.sft, print) == entry
    DAMAGES[damage](entry)
    said: list[str] = []
    assert store.find("k", Phase.sft, said.append) is None
    (line,) = said
    assert line.startswith(f"sft: the stored phase {entry} is not used: ")
    trusted = "world" not in damage and "user" not in damage
    assert trusted or line.endswith("another user of this machine may have written it")
    # It stands in nobody's way.
    store.put("other", Phase.sft, run_with(tmp_path, "two", "w"))
    assert {each.key for each in store.entries()} == {"k", "other"}
    assert store.clear() == []
    assert list(store.folder.iterdir()) == []


def test_what_a_killed_run_left_is_removed_unless_it_is_in_use(tmp_path: Path) -> None:
    store, _ = stored(tmp_path)
    for key in ("dead", "alive"):
        (store.folder / f".{key}.building").mkdir()
        (store.folder / f"{key}.lock").touch()
    with store.entry_lock("alive"), store.entry_lock("k"):
        assert store.clear() == ["k"]
    assert {each.name for each in store.folder.iterdir()} == {
        *("k", "k.lock", "alive.lock", ".alive.building")
    }
