"""Every bad input of the catalogue gets an answer and no traceback: RlhfError, or exit code 2.

Damaged models and tokenizers are in tests/models/test_damaged_folders.py, rows and files that plans
and runs refuse alike in tests/jobs/test_data_refusals.py; tests/fuzz draws others.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.base.cpu import usable_isa
from rlhf.base.errors import RlhfError
from rlhf.config.choices import Phase, Source
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.run import RunConfig
from rlhf.data.reading import describe_dataset, load_datasets
from rlhf.data.splits import blend_datasets, check_usable_examples, divide_over_phases
from rlhf.runtime.launch_mode import launch_mode
from rlhf.runtime.rendezvous import replace_rank_counts
from tests.bad_inputs import FILES, GOOD, MANY
from tests.conftest import Compose


def local(compose: Compose, path: Path, eval_path: str | None = None) -> RunConfig:
    config = to_run_config(compose([]))
    data = replace(config.data, source=Source.local, path=str(path), eval_path=eval_path)
    return replace(config, data=data)


def what_is_read(config: RunConfig) -> str:
    """Divide the data over the phases, which must be enough; return what is said of it."""
    data, datasets = config.data, load_datasets(config.data, seed=1)
    divided = divide_over_phases(datasets, split=data.split, eval_share=data.eval_share, seed=1)
    parts = {phase: blend_datasets(found, seed=1) for phase, found in divided.items()}
    check_usable_examples(parts, [Phase.sft, Phase.reward, Phase.ppo])
    return "; ".join(map(describe_dataset, datasets))


@pytest.mark.parametrize(
    "label", ["one prompt is null", "chosen equals rejected", "one row has other columns"]
)
def test_what_is_skipped_is_counted(label: str, compose: Compose, tmp_path: Path) -> None:
    name, content = FILES[label]
    (tmp_path / name).write_bytes(content)
    assert re.search(r"[1-9]\d* skipped", what_is_read(local(compose, tmp_path / name)))


@pytest.mark.parametrize("path", ["missing.jsonl", "empty", "/dev/null"])
@pytest.mark.parametrize("key", ["path", "eval_path"])
def test_a_path_without_data_is_refused(
    key: str, path: str, compose: Compose, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (good := tmp_path / "good.jsonl").write_bytes(MANY)
    bad = tmp_path / path
    config = local(compose, bad) if key == "path" else local(compose, good, str(bad))
    with pytest.raises(RlhfError):
        what_is_read(config)


VARIABLES: list[dict[str, str]] = [
    {"RLHF_MAX_CPU_ISA": "mmx"},
    {"LOCAL_RANK": "0", "RANK": "a", "WORLD_SIZE": "2"},
    {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "0"},
    {"LOCAL_RANK": "0", "RANK": "5", "WORLD_SIZE": "2"},
    {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"},
    {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "x"},
    {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "7"},
    {"SLURM_PROCID": "a", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "z", "SLURM_JOB_NODELIST": "a"},
]


@pytest.mark.parametrize("variables", VARIABLES, ids=str)
def test_wrong_variables_are_refused(
    variables: dict[str, str], compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = to_run_config(compose([]))

    def read() -> None:
        usable_isa()
        if "LOCAL_RANK" in variables:
            replace_rank_counts(config)
        launch_mode(replace(config, hardware=replace(config.hardware, nodes=2)), variables)

    with pytest.raises(RlhfError):
        read()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)
COLUMNS = st.sampled_from(["prompt", "chosen", "rejected", "messages", "text", "responses", "x"])


@pytest.mark.slow
def test_rows_of_any_kind_are_used_counted_or_refused(compose: Compose, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    data = replace(to_run_config(compose([])).data, source=Source.local, path=str(path))

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(rows=st.lists(JSON | st.dictionaries(COLUMNS, JSON, min_size=1), min_size=1, max_size=4))
    def answers(rows: list[object]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        try:
            (found,) = load_datasets(data, seed=1)
            told = f"{path}{describe_dataset(found)}"
        except RlhfError as error:
            told = f"{error} 0 skipped"
        assert str(path) in told
        assert re.search(r"\d skipped", told)

    answers()


@pytest.mark.parametrize(
    "text",
    [
        "\u05e9\u05dc\u05d5\u05dd \u200f\u05e2",
        "👩‍👩‍👧 🇯🇵 é",
        "<|endoftext|> </s> [INST]",
        "\u2028 \u200d",
        "x" * 10**6,
    ],
)
def test_unusual_text_is_read_unchanged(text: str, compose: Compose, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD | {"chosen": f" {text}"}, ensure_ascii=False) + "\n")
    data = to_run_config(compose([])).data
    (found,) = load_datasets(replace(data, source=Source.local, path=str(path)), seed=1)
    assert [record.chosen for record in found.train] == [f" {text}"]
