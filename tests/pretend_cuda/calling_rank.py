"""One of two ranks of test_collectives: calls collectives, and prints what they answer."""

import json
import sys
from collections.abc import Callable

import torch
from torch import distributed as dist

from rlhf.base.metrics import Maximum, Mean, Metrics
from rlhf.base.ranks import Ranks
from rlhf.config.choices import Device
from rlhf.engine.devices import select_device, start_process_group

Call = Callable[[], object]


def gpu(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype, device="cuda")


REFUSED: dict[str, Call] = {
    "host": lambda: dist.all_reduce(torch.zeros(2)),
    "host_list": lambda: dist.all_gather([torch.zeros(2), torch.zeros(2)], gpu(2)),
    "other_gpu": lambda: dist.all_reduce(torch.zeros(2, device=f"cuda:{1 - dist.get_rank()}")),
    "int16": lambda: dist.all_reduce(gpu(2, dtype=torch.int16)),
    "types": lambda: dist.all_gather_into_tensor(gpu(4), gpu(2, dtype=torch.bfloat16)),
    "strides": lambda: dist.broadcast(gpu(2, 3).t(), src=0),
    "bool_sum": lambda: dist.all_reduce(gpu(2, dtype=torch.bool)),
    "bitwise": lambda: dist.all_reduce(gpu(2, dtype=torch.int64), op=dist.ReduceOp.BOR),
    "fp8": lambda: dist.all_reduce(gpu(2, dtype=torch.float8_e4m3fn)),
    "size": lambda: dist.reduce_scatter_tensor(gpu(2), gpu(5)),
    "monitored": lambda: dist.monitored_barrier(wait_all_ranks=True),
}


def either(rank_0: Call, rank_1: Call) -> object:
    return (rank_0, rank_1)[dist.get_rank()]()


DIFFERENT: dict[str, Call] = {
    "order": lambda: either(
        dist.barrier,
        lambda: dist.all_reduce(gpu(2)),
    ),
    "shape": lambda: dist.all_reduce(gpu(2 + dist.get_rank())),
    "dtype": lambda: dist.broadcast(
        gpu(2, dtype=(torch.float32, torch.bfloat16)[dist.get_rank()]), src=0
    ),
    "source": lambda: dist.broadcast(gpu(2), src=dist.get_rank()),
    "objects": lambda: either(
        lambda: dist.all_gather_object([None, None], "here"),
        lambda: dist.broadcast_object_list(["here"], src=0),
    ),
}


def answer(call: Call) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


def check_ranks(ranks: Ranks) -> None:
    """Check all collectives of the phases, with values of the host as well."""
    here = torch.arange(6.0).view(2, 3).t() + ranks.rank
    metrics: Metrics = {
        "mean": Mean.of(torch.ones(3, device="cuda") + ranks.rank),
        "largest": Maximum(torch.tensor(float(ranks.rank), device="cuda")),
    }
    for tensor in (here, here.to("cuda")):
        assert ranks.sum(tensor).tolist() == (2 * here - 2 * ranks.rank + 1).tolist()
        assert ranks.max(tensor).tolist() == (here - ranks.rank + 1).tolist()
    assert ranks.any(ranks.is_main)
    ranks.barrier()
    assert ranks.all_gather({"rank": ranks.rank}) == [{"rank": 0}, {"rank": 1}]
    merged = ranks.reduce_metrics(metrics)
    assert [metric.value() for metric in merged.values()] == [1.5, 1.0]


def main(rank: int, store: str) -> None:
    ranks = Ranks(rank, 2, select_device(Device.cuda))
    start_process_group(Device.cuda, store=dist.FileStore(store, 2), rank=rank, world_size=2)
    answers = {name: answer(call) for name, call in (REFUSED | DIFFERENT).items()}
    answers["sound"] = answer(lambda: check_ranks(ranks))
    if rank == 0:
        for _ in range(2):
            answers["number"] = answer(lambda: dist.all_reduce(gpu(2)))
    print(json.dumps(answers))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
