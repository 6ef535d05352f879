"""One rank of test_real_model_states: what training really keeps, counted tensor by tensor."""

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.base.ranks import Ranks
from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Device, Dtype, TrainingEngine
from rlhf.config.roles import Role
from rlhf.engine.devices import current_ranks
from rlhf.engine.select import build_engine
from rlhf.engine.settings import EngineSettings
from rlhf.models.build import ModelSource, build_actor
from rlhf.models.tokenizers import train_tokenizer
from rlhf.options import ZeroConfig
from rlhf.options.average.moving_average import MovingAverage
from tests.architectures import sizes
from tests.engine.test_deepspeed_config import zero
from tests.lora_settings import adding, lora_config
from tests.zero_settings import adamw

RANKS = 2
LORA_RANK = 16
OPT = sizes("opt", 384, 1536, heads=6, max_position_embeddings=64)
# Stage, LoRA, EMA, and zero.param_persistence_threshold: with its default the adapters, biases and
# norms of a model as small as this stay whole in stage 3.
CASES = [
    *((stage, False, True, 0) for stage in range(4)),
    *((stage, True, False, 0) for stage in (2, 3)),
    (3, True, False, None),
]

Bytes = dict[str, int]


def model_state_bytes(engine: Any) -> Bytes:
    """Bytes of this rank by what they are for; memory that two things share belongs to the first.

    Gradients are those of now: the optimiser's step takes most of them away.
    """
    wrapper = engine._deepspeed.optimizer  # DeepSpeed's around torch's; at stage 0 torch's own
    optimizer = getattr(wrapper, "optimizer", wrapper)
    parameters = list(engine.module.parameters())
    masters = _found(wrapper, "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    held = {
        "weights": [[p.data, *_found(p, "ds_tensor", "ds_secondary_tensor")] for p in parameters],
        "gradients": [
            [p.grad for p in (*parameters, *_tensors(masters))],
            _found(
                wrapper, "averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer"
            ),
        ],
        "masters": masters,
        "moments": list(optimizer.state.values()),
        "ema": [] if engine.follower is None else engine.follower.shards,
    }
    seen: set[int] = set()
    return {name: _bytes_of_new(_tensors(things), seen) for name, things in held.items()}


def _found(thing: Any, *names: str) -> list[Any]:
    return [getattr(thing, name, None) for name in names]


def _tensors(things: Any) -> Iterator[Tensor]:
    if isinstance(things, Tensor):
        yield things
    elif isinstance(things, dict):
        yield from _tensors(list(things.values()))
    elif isinstance(things, list | tuple):
        for thing in things:
            yield from _tensors(thing)


def _bytes_of_new(tensors: Iterator[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def group_by_setting(stage: int, threshold: int | None) -> ZeroConfig:
    """ZeRO as both the ranks and the plan have it; small buckets, for they are no states."""
    return zero(
        engine=TrainingEngine.deepspeed,
        stage=stage,
        param_persistence_threshold=threshold,
        reduce_bucket_size=10**6,
    )


def measured(
    ranks: Ranks, *, stage: int, lora: bool, ema: bool, threshold: int | None
) -> dict[str, Any]:
    """A real actor after one step: its numbers of weights, and the most that each state takes.

    Gradients are largest at the end of some micro-batch's backward pass; the other states stay.
    """
    tokenizer = train_tokenizer(["some text"], vocab_size=300)
    source = ModelSource(key="model", path=None, architecture=OPT)
    spec = lora_config(rank=LORA_RANK, alpha=32.0)
    module = build_actor(source, tokenizer, seed=1, extensions=adding(spec if lora else None))
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    engine = build_engine(
        module,
        role=Role.actor,
        settings=EngineSettings(zero=group_by_setting(stage, threshold), dtype=Dtype.bf16),
        plan=BatchPlan(per_rank=2, micro=1, accumulation=2),
        ranks=ranks,
        optimizer=adamw(lr=1e-3, follow=partial(MovingAverage, beta=0.99) if ema else None),
    )
    ids_BS = torch.arange(16)[None] + 10 * ranks.rank
    seen: list[Bytes] = []
    for _ in range(2):  # from the second step on there are moments
        for _ in range(2):
            engine.backward(engine(input_ids=ids_BS).logits.float().square().mean())
            seen.append(model_state_bytes(engine))
        engine.step()
    engine.close()
    return {
        "vocab": len(tokenizer),
        "weights": sum(size for size, _ in sizes),
        "trained": sum(size for size, is_trained in sizes if is_trained),
        "bytes": {name: max(bytes_[name] for bytes_ in seen) for name in seen[0]},
    }


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    ranks = current_ranks(Device.cpu)
    found = [
        measured(ranks, stage=stage, lora=lora, ema=ema, threshold=threshold)
        for stage, lora, ema, threshold in CASES
    ]
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(found))
    ranks.barrier()
    # At once: gloo's threads may abort a process that still holds engines when Python unwinds it.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
