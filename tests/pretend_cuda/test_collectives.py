"""Collectives of pretended GPUs refuse what NCCL refuses, and ranks that differ end in an error."""

import json
import re
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from tests.pretend_cuda.gpu import missing_to_pretend
from tests.runs import ON_GPU, ROOT, free_port, start

pytestmark = pytest.mark.skipif(missing_to_pretend() is not None, reason=str(missing_to_pretend()))
RANK = Path(__file__).with_name("calling_rank.py")
HERE = r"tests/pretend_cuda/calling_rank\.py:\d+"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two ranks has answered."""
    folder = tmp_path_factory.mktemp("ranks")
    words = ["-m", "tests.pretend_cuda", "--machine", "2xa100", RANK]
    ranks = [
        start(*words, rank, folder / "store", cwd=ROOT, LOCAL_RANK=rank, PYTHONPATH=ROOT, **ON_GPU)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    return [json.loads(output) for output, _ in said]


def test_the_links_of_two_nodes_are_checked() -> None:
    """As docs/operations.md says: torchrun on each node, here both on this machine."""
    port, module = free_port(), ["-m", "rlhf.gpu_check.collectives"]
    words = ["-m", "tests.pretend_cuda", "--machine", "2xa100", "-m", "torch.distributed.run"]
    words += ["--nnodes=2", "--nproc-per-node=2", "--master-addr=localhost"]
    words += [f"--master-port={port}"]
    nodes = [
        start(*words, f"--node-rank={node}", *module, cwd=ROOT, PYTHONPATH=ROOT, **ON_GPU)
        for node in range(2)
    ]
    said = [process.communicate(timeout=180) for process in nodes]
    assert [process.returncode for process in nodes] == [0, 0], said
    assert [said[0][0].count("right in 5 precisions; "), said[1][0]] == [1, ""]
    assert "FutureWarning" not in said[0][1]


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("host", "No backend type associated with device type cpu"),
        ("host_list", "No backend type associated with device type cpu"),
        ("other_gpu", "Tensor found on device cuda:. but backend constrained to cuda:."),
        ("int16", "not supported for NCCL process group: torch.int16"),
        ("types", "must have identical type"),
        ("strides", "must be contiguous"),
        ("bool_sum", "does not add booleans"),
        ("bitwise", "Cannot use ReduceOp.BOR with NCCL"),
        ("fp8", "begins with sm90"),
        ("size", "reduce_scatter_tensor of 2 ranks: 5 numbers in all, 2 of one"),
        ("monitored", "only implemented for GLOO"),
    ],
)
def test_collectives_refuse_what_nccl_refuses(
    answers: list[dict[str, str]], case: str, error: str
) -> None:
    for rank in answers:
        assert re.search(error, rank[case])


@pytest.mark.parametrize(
    ("case", "rank_0", "rank_1"),
    [
        ("order", r"barrier\(\)", r"all_reduce\(float32 \[2\]\)"),
        ("shape", r"all_reduce\(float32 \[2\]\)", r"all_reduce\(float32 \[3\]\)"),
        ("dtype", r"broadcast\(float32 \[2\], src=0\)", r"broadcast\(bfloat16 \[2\], src=0\)"),
        ("source", r"broadcast\(float32 \[2\], src=0\)", r"broadcast\(float32 \[2\], src=1\)"),
        ("objects", r"all_gather_object\(\)", r"broadcast_object_list\(src=0\)"),
    ],
)
def test_ranks_that_differ_end_with_both_lines(
    answers: list[dict[str, str]], case: str, rank_0: str, rank_1: str
) -> None:
    both = rf"rank 0: {rank_0} at {HERE}\n +rank 1: {rank_1} at {HERE}"
    for rank in answers:
        assert re.search(both, rank[case])


def test_after_its_end_a_rank_is_not_waited_for(answers: list[dict[str, str]]) -> None:
    both = rf"rank 0: all_reduce\(float32 \[2\]\) at {HERE}\n +rank 1: the end .* at rlhf/base/"
    assert re.search(both, answers[0]["number"])


def test_ranks_that_agree_compute(answers: list[dict[str, str]]) -> None:
    assert [rank["sound"] for rank in answers] == ["no error"] * 2


def test_a_rank_that_is_elsewhere_is_named() -> None:
    from tests.pretend_cuda.nccl import Order

    store, soon = HashStore(), timedelta(seconds=0.1)
    waits, elsewhere = (Order(n, store, r, [0, 1], soon) for r, n in enumerate(("one", "two")))
    with pytest.raises(RuntimeError, match=r"rank 0: still not here; its last call was none"):
        elsewhere.agree("barrier()", "b.py:2")
    error = r"rank 1: still not here; its last call was barrier\(\) at b\.py:2"
    with pytest.raises(RuntimeError, match=error):
        waits.agree("all_reduce()", "a.py:1")
