"""Two ranks build and save models of which neither has more than its engine will hold."""

import importlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import WarmPopen
from tests.runs import ROOT, TORCHRUN, python

pytestmark = pytest.mark.slow


def test_what_is_built_sharded_is_what_is_built_whole(tmp_path: Path) -> None:
    run = python(*TORCHRUN, "-m", "tests.runtime.sharded_rank", tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs two ranks on a Llama of 59 million weights, of which a file has them in bf16."""
    folder = tmp_path_factory.mktemp("half")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        patch.setattr(subprocess, "Popen", WarmPopen)
        loading = importlib.import_module("loading_ranks")
        loading.make_half(folder, "llama60m")
        yield lambda **task: loading.run_ranks({"folder": str(folder), "shape": "llama60m", **task})


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        ("stored", "bf16"),
        pytest.param("random", "fp32", marks=pytest.mark.soak),
        pytest.param("stored", "fp32", marks=pytest.mark.soak),
        pytest.param("random", "bf16", marks=pytest.mark.soak),
    ],
)
def test_neither_loading_nor_saving_takes_a_whole_copy(ranks: Any, source: str, dtype: str) -> None:
    for number, rank in enumerate(ranks(source=source, dtype=dtype, zero="stage3")):
        whole, shard = rank["whole"], rank["shard"]
        assert shard == pytest.approx(whole / 2, rel=0.01)
        # Some megabytes that imports have freed are used again.
        assert 0.85 * shard < rank["loading"]["peak"] < shard + 0.35 * whole
        # A file of 20 MB on the first rank, and on all the largest parameter as it is gathered.
        assert rank["saving"]["peak"] < (0.35 if number else 0.6) * whole


@pytest.mark.soak
@pytest.mark.parametrize(("source", "dtype"), [("stored", "fp32"), ("random", "bf16")])
def test_unsharded_ranks_load_one_copy_in_their_precision(
    ranks: Any, source: str, dtype: str
) -> None:
    for rank in ranks(source=source, dtype=dtype, zero="stage1"):
        assert rank["whole"] == rank["shard"]
        assert 0.85 < rank["loading"]["peak"] / rank["whole"] < 1.35
