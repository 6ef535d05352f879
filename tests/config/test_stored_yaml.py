"""config.yaml of a run directory from elsewhere: nothing but plain values is read."""

import time
from pathlib import Path

import pytest

from rlhf.base.errors import CheckpointError
from rlhf.base.stored_files import DamagedFileError
from rlhf.config.freeze import COMMAND, FROZEN, load_frozen_config, read_command, read_frozen_keys

BOMB = "seed: 1\na0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
FOREIGN = {
    'seed: 1\nname: "$\\u007Boc.env:RLHF_KEY}"': "interpolation",
    'seed: 1\nname: "\\x24{oc.env:RLHF_KEY}"': "interpolation",
    "seed: 1\ndata: {path: [a, {b: '${oc.env:RLHF_KEY}'}]}": "interpolation",
    "seed: 1\n'${oc.env:RLHF_KEY}': 1": "interpolation",
    BOMB: "alias",
    "seed: 1\na: &a [*a]": "alias",
    "seed: 1\na: " + "[" * 5000 + "]" * 5000: "levels|increasing flow level",
    "seed: 1\na: " + "x" * 2_000_000: "characters",
    "seed: 1\na: !!python/object/apply:os.system [true]": "a tag",
    "seed: 1\na: !!timestamp x": "a tag",
    "seed: 1\na: !!binary x": "a tag",
    "seed: 1\nx: 0x" + "f" * 9000: "64 bits",
    "seed: 1\nx: " + "1" * 9000: "limit",
    "seed: one": "seed is not a whole number",
    "seed: 1\nppo: {rollout_batch_size: many}": "ppo.rollout_batch_size is not",
    "[seed]": "none of the keys of a run",
    "": "none of the keys of a run",
    "a: [": "parsing a flow node",
    "\udcff\udcfe\0": "UTF-8|unacceptable",
    "seed: 1\nseed: 2": "constructing a mapping",
}


@pytest.mark.parametrize(("text", "reason"), FOREIGN.items(), ids=range(len(FOREIGN)))
def test_anything_but_plain_values_is_refused_at_once(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_KEY", "zzsecretzz")
    (tmp_path / FROZEN).write_text(text, errors="surrogateescape")
    began = time.process_time()
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_frozen_keys(tmp_path)
    assert time.process_time() - began < 5
    assert str(caught.value).startswith(f"{tmp_path / FROZEN} ")
    assert "zzsecretzz" not in str(caught.value)
    with pytest.raises(CheckpointError, match=f"{reason}|expected a whole number") as caught:
        load_frozen_config(tmp_path)
    told = "is damaged, or no run wrote it" if "UTF-8" in reason else "If another version of this"
    assert told in str(caught.value)


def test_a_key_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / FROZEN).write_text("seed: 1\nof_another_version: {x: 1}\n")
    keys = read_frozen_keys(tmp_path)
    assert keys["of_another_version.x"] == 1
    with pytest.raises(CheckpointError, match=r"config\.yaml cannot be read: ppo\.kl_ctl is miss"):
        keys["ppo.kl_ctl"]
    with pytest.raises(CheckpointError, match=r"unknown key of_another_.* another version"):
        load_frozen_config(tmp_path)


def test_a_damaged_command_is_refused_by_name(tmp_path: Path) -> None:
    assert read_command(tmp_path) == []
    (tmp_path / COMMAND).write_text("python launch.py 'name=my run' seed=1\n")
    assert read_command(tmp_path) == ["name=my run", "seed=1"]
    for content in (b"python launch.py 'name=my run", b"\xff\xfe"):
        (tmp_path / COMMAND).write_bytes(content)
        with pytest.raises(DamagedFileError, match=r"command\.txt is damaged"):
            read_command(tmp_path)
