"""Public commands, environments and moved folders, tried anew: they work, or are refused in words.

The numbers are those of a list of 71 public cases.
"""

import io
import json
import sys
from pathlib import Path

import pytest

from rlhf.base.command import survive_output_errors
from rlhf.base.errors import CapabilityError
from rlhf.config.choices import Phase, WandbMode
from rlhf.config.freeze import load_run, write_frozen_config
from rlhf.config.hydra_parts import parse_overrides
from rlhf.jobs.input_files import check_input_hashes, write_input_hashes
from rlhf.jobs.sweep_command import add_sweep_folders, job_folder_name, sweep_folder_of
from rlhf.jobs.sweeper import combine_values
from rlhf.run.finished_phase import finish_phase, verify_phase
from rlhf.run.results import read_phase_result
from tests.conftest import Compose
from tests.plan.planned import run_of

# Row, the word of a sweep, and its jobs.
SWEPT: list[tuple[float, str, list[str]]] = [
    (59, "tracking.tags=[a],[a,b],null", ["[a]", "[a,b]", "null"]),
    (59.1, "tracking.project='a,b','c=d'", ["'a,b'", "'c=d'"]),
    (60, "seed=range(1,4)", ["1", "2", "3"]),
    (60.1, "sft.lr=choice(1e-3,1e-4)", ["0.001", "0.0001"]),
    (60.2, "ppo.kl_ctl=range(0.1,0.4,0.1)", ["0.1", "0.2", "0.30000000000000004", "0.4"]),
    (60.3, "zero=glob(stage1*)", ["stage1", "stage1_offload"]),
    (61, "data.path=/a/x.jsonl,/b/x.jsonl", ["/a/x.jsonl", "/b/x.jsonl"]),
]


class Groups:
    """The options of a group, which Hydra's sweeper asks for."""

    def get_group_options(self, *_: object, **__: object) -> list[str]:
        return ["stage0", "stage1", "stage1_offload"]


@pytest.mark.parametrize(("case", "word", "values"), SWEPT)
def test_sweeps_have_a_job_in_its_own_folder_for_each_value(
    case: float, word: str, values: list[str]
) -> None:
    words = add_sweep_folders(["-m", word], ["-m", word])
    assert sweep_folder_of(words) is not None
    jobs = combine_values(parse_overrides([word], Groups()), paired=[])
    assert [job[0].partition("=")[2] for job in jobs] == values
    folders = {job_folder_name(job[0]) for job in jobs}
    assert len(folders) == len(values)
    assert not any("/" in folder for folder in folders)


def test_weights_and_biases_that_is_switched_off_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from rlhf.run.wandb_run import _require_login

    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(CapabilityError, match=r"WANDB_MODE forbids .*tracking=wandb_offline"):
        _require_login(WandbMode.online)  # 65


def test_runs_are_read_where_they_were_moved(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "Say it", "chosen": "yes", "rejected": "no"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row))
    config = run_of(compose, "experiment=smoke", "data=local", "data.path=mine.jsonl")
    first, moved = tmp_path / "run", tmp_path / "my rün (1)"
    first.mkdir()
    write_frozen_config(config, first)
    write_input_hashes(config, first)
    (first / "metrics.jsonl").write_text('{"phase": "sft", "step": 1, "sft/loss": 2.0}\n')
    (first / "sft").mkdir()
    (first / "sft" / "weights").write_text("w")
    finish_phase(first, Phase.sft, {"perplexity_before": 2.0, "perplexity_after": 1.0})
    first.rename(moved)
    assert verify_phase(moved, Phase.sft) is None  # 68
    assert read_phase_result(moved, Phase.sft) is not None
    assert load_run(moved).data == config.data
    check_input_hashes(load_run(moved), moved)  # 69


def test_chinese_data_is_described_on_an_ascii_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "screen").open("wb") as screen:
        stdout = io.TextIOWrapper(screen, encoding="ascii")
        for name in ("stdout", "__stdout__"):
            monkeypatch.setattr(sys, name, stdout)
        survive_output_errors()
        print("\u6570\u636e: 24 examples")  # 70
        sys.stdout.flush()
        assert (tmp_path / "screen").read_bytes() == b"\\u6570\\u636e: 24 examples\n"
