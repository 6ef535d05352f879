"""Check the collectives of a run: torchrun --nproc-per-node=GPUS -m rlhf.gpu_check.collectives.

With --nnodes=NODES and --node-rank on each node, the links between the nodes are checked too.

All values are small whole numbers, whose sums are exact in every precision.
"""

from __future__ import annotations

from time import perf_counter

import torch
import torch.distributed as dist

from rlhf.base.command import quieten_libraries
from rlhf.base.ranks import Ranks
from rlhf.config.choices import Device
from rlhf.engine.devices import current_ranks, select_device, start_process_group
from rlhf.run.console import Console

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)
ELEMENTS = 1 << 20  # elements per rank: more than NCCL sends in one piece
REPEATS = 5  # all-reduces that are timed


def differing_results(ranks: Ranks, dtype: torch.dtype) -> list[str]:
    """Return the names of the collectives whose results on this rank are not as expected."""
    size, value = ranks.size, ranks.rank + 1
    own_N = torch.full((ELEMENTS,), value, dtype=dtype, device=ranks.device)
    # Slice r of this tensor is own_N of rank r.
    every_M = torch.arange(1, size + 1, device=ranks.device).to(dtype).repeat_interleave(ELEMENTS)
    total = size * (size + 1) // 2

    to_all, scattered = own_N.clone(), torch.zeros_like(own_N)
    gathered, exchanged = torch.zeros(2, len(every_M), dtype=dtype, device=ranks.device)
    dist.broadcast(to_all, src=size - 1)
    dist.reduce_scatter_tensor(scattered, every_M)
    dist.all_gather_into_tensor(gathered, own_N)
    dist.all_to_all_single(exchanged, own_N.repeat(size))
    results = {  # name -> result, expected
        "sum": (ranks.sum(own_N), total),
        "sum of a tensor on the host": (ranks.sum(own_N.cpu()), total),
        "maximum": (ranks.max(own_N), size),
        "broadcast": (to_all, size),
        "reduce-scatter": (scattered, size * value),
        "all-gather": (gathered, every_M),
        "all-to-all": (exchanged, every_M),
        "all-gather of objects": (torch.tensor(ranks.all_gather(value)), torch.arange(1, size + 1)),
    }
    return [f"{name} in {dtype}" for name, (x, y) in results.items() if not (x == y).all()]


def _gigabytes_per_second(ranks: Ranks) -> float:
    """Return the GB/s that each rank sends in a ring while all ranks sum tensors of 64 MiB."""
    tensor_N = torch.zeros(1 << 24, device=ranks.device)
    dist.all_reduce(tensor_N)  # connects the ranks
    torch.cuda.synchronize()
    began = perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(tensor_N)
    torch.cuda.synchronize()
    return 2 * (1 - 1 / ranks.size) * tensor_N.nbytes * REPEATS / (perf_counter() - began) / 1e9


def main() -> None:
    """Check each precision on all ranks; exit with code 1 if a result is wrong on any of them."""
    quieten_libraries()
    select_device(Device.cuda)
    start_process_group(Device.cuda)
    ranks = current_ranks(Device.cuda)
    differing = [name for dtype in DTYPES for name in differing_results(ranks, dtype)]
    gathered = ranks.all_gather(differing)
    wrong = [f"rank {rank}: {names}" for rank, names in enumerate(gathered) if names]
    rate = _gigabytes_per_second(ranks)
    console = Console(quiet=not ranks.is_main)
    console.say("; ".join(wrong) or f"right in {len(DTYPES)} precisions; {rate:.1f} GB/s")
    dist.destroy_process_group()
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
