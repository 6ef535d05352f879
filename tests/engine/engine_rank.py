"""One rank of test_engine: a small engine under every ZeRO stage, and what it must keep to."""

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlhf.base.ranks import Ranks
from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Device, Dtype, TrainingEngine
from rlhf.config.roles import Role
from rlhf.engine.deepspeed_engine import DeepSpeedEngine
from rlhf.engine.devices import current_ranks
from rlhf.engine.settings import EngineSettings, OptimizerSettings
from rlhf.engine.torch_engine import TorchEngine
from rlhf.options import ZeroConfig
from rlhf.options.average.moving_average import MovingAverage
from rlhf.options.replay.weight_digests import sum_digests
from rlhf.run.phase_state import Checkpoint, checkpoint_folder, load_checkpoint, write_checkpoint
from tests.emulated_fp16 import emulate_fp16
from tests.plain_engine import whole_state
from tests.zero_settings import adamw, zero_config

BETA = 0.75
PADDING = 4  # elements by which shares differ: DeepSpeed aligns the start of a rank's shard
PLAIN = zero_config(stage=0, engine=TrainingEngine.deepspeed, param_persistence_threshold=0)
ADAMW = adamw(max_grad_norm=0.0, follow=partial(MovingAverage, beta=BETA))


class Line(torch.nn.Module):
    """Two layers, the lower one frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.frozen = torch.nn.Linear(4, 6)
        self.lora_top = torch.nn.Linear(6, 2)
        self.head = torch.nn.Linear(6, 1)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        hidden_BH = self.frozen(x_BI)
        return self.lora_top(hidden_BH).sum() + self.head(hidden_BH).square().sum()


def engine_of(
    ranks: Ranks, zero: ZeroConfig, dtype: Dtype, optimizer: OptimizerSettings = ADAMW
) -> DeepSpeedEngine:
    return DeepSpeedEngine(
        Line(),
        role=Role.actor,
        settings=EngineSettings(zero=zero, dtype=dtype),
        plan=BatchPlan(per_rank=2, micro=1, accumulation=2),
        ranks=ranks,
        optimizer=optimizer,
    )


def backward_twice(engine: DeepSpeedEngine, ranks: Ranks, *, scale: float = 1.0) -> None:
    """The gradients of one step; the step itself is left to the caller."""
    dtype = next(engine.module.parameters()).dtype
    for micro in range(2):
        x_BI = scale * torch.arange(4, dtype=dtype)[None] + ranks.rank + micro
        engine.backward(engine(x_BI).float())


def weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {n: w.float() for n, w in whole_state(engine).items()}


def loss_scale(engine: DeepSpeedEngine) -> float:
    return engine._deepspeed.optimizer.loss_scale


def check_average(ranks: Ranks, zero: ZeroConfig, dtype: Dtype) -> None:
    """The average is that of the weights after each step, and leaves them as they were."""
    engine = engine_of(ranks, zero, dtype)
    expected = weights(engine)
    for _ in range(3):
        backward_twice(engine, ranks)
        engine.step()
        now = weights(engine)
        expected = {n: BETA * w + (1 - BETA) * now[n] for n, w in expected.items()}
    before = weights(engine)
    with engine.follower.swap_in():
        inside = weights(engine)
    after = weights(engine)
    tolerance = 1e-6 if dtype is Dtype.fp32 else 2e-2  # weights are read back in bf16
    for name, average in expected.items():
        torch.testing.assert_close(inside[name], average, atol=tolerance, rtol=tolerance)
        assert torch.equal(before[name], after[name])
    assert not torch.equal(inside["head.weight"], before["head.weight"])
    untouched = weights(engine_of(ranks, zero, dtype))
    assert torch.equal(before["frozen.weight"], untouched["frozen.weight"])
    backward_twice(engine, ranks)
    engine.step()  # training goes on from the weights, not from the average
    assert not torch.equal(weights(engine)["head.weight"], before["head.weight"])


def check_adapter_rate(ranks: Ranks, zero: ZeroConfig) -> None:
    """Adapters learn at their own rate; the first AdamW step is as long as the learning rate."""

    def lr_of(name: str) -> float | None:
        return 0.3 if "lora_" in name else None

    engine = engine_of(ranks, zero, Dtype.fp32, replace(ADAMW, lr_of=lr_of, follow=None))
    before = weights(engine)
    backward_twice(engine, ranks)
    engine.step()
    moved = {n: (w - before[n]).abs().max().item() for n, w in weights(engine).items()}
    assert abs(moved["lora_top.weight"] - 0.3) < 1e-4
    assert abs(moved["head.weight"] - 0.1) < 1e-4
    assert moved["frozen.weight"] == 0
    engine.lr_scale = 0.5
    backward_twice(engine, ranks)
    report = engine.step()
    assert min(abs(report.learning_rate - rate) for rate in (0.05, 0.15)) < 1e-9


def check_broken_gradient(ranks: Ranks, zero: ZeroConfig, dtype: Dtype) -> None:
    """A gradient that is not finite on one rank leaves no trace on any."""
    engine, same = (engine_of(ranks, zero, dtype, replace(ADAMW, max_grad_norm=1.0)) for _ in "ab")
    before = weights(engine)
    for value in (float("nan"), float("inf")):
        backward_twice(engine, ranks, scale=value if ranks.rank == 1 else 1.0)
        report = engine.step()
        assert report.is_skipped
        assert all(torch.equal(w, before[n]) for n, w in weights(engine).items())
    for each in (engine, same):
        backward_twice(each, ranks)
        report = each.step()
        assert not report.is_skipped
    for name, weight in weights(same).items():
        assert torch.equal(weight, weights(engine)[name]), name


def check_overflow(ranks: Ranks, zero: ZeroConfig) -> None:
    """An overflow is known before the step; a discarded step changes neither weights nor scale."""
    emulate_fp16()
    engine = engine_of(ranks, zero, Dtype.fp16, replace(ADAMW, follow=None))
    while True:  # until the loss scale has come down to where gradients are finite
        backward_twice(engine, ranks)
        overflows = engine.has_overflow()
        report = engine.step()
        assert report.is_skipped == overflows
        if not overflows:
            break
    before, scale = weights(engine), loss_scale(engine)
    backward_twice(engine, ranks)
    assert not engine.has_overflow()
    report = engine.step(discard=True)
    assert report.is_skipped
    assert all(torch.equal(w, before[n]) for n, w in weights(engine).items())
    assert loss_scale(engine) == scale
    backward_twice(engine, ranks)
    report = engine.step()
    assert not report.is_skipped


def check_checkpoint(ranks: Ranks, zero: ZeroConfig, folder: Path) -> None:
    """All ranks save; one rank of another engine reads it, and the other way round, bit for bit."""
    saved, read = (engine_of(ranks, zero, Dtype.fp32) for _ in "ab")
    other = engine_of(ranks, replace(PLAIN, stage=(zero.stage + 1) % 4), Dtype.fp32)
    settings = EngineSettings(zero=PLAIN, dtype=Dtype.fp32)
    alone = TorchEngine(Line(), role=Role.actor, settings=settings, ranks=Ranks(), optimizer=ADAMW)
    backward_twice(saved, ranks)
    saved.step()
    digests = sum_digests({"model": saved}, ranks)
    assert digests != sum_digests({"model": read}, ranks)

    def carry(source: Any, target: Any, place: Path, writers: Ranks) -> None:
        if source is not alone or ranks.is_main:
            stream = {"model": source.training_state.stream()}
            write_checkpoint(place, 1, stream, {"logs": {}}, wanted_bytes=0, ranks=writers)
        ranks.barrier()
        stored = load_checkpoint(checkpoint_folder(place, 1), ranks)
        target.training_state.load(stored.build_tensor_reader("model"))
        beside = ranks if target is not alone else Ranks()
        assert sum_digests({"model": target}, beside) == digests

    carry(saved, alone, folder / "all", ranks)
    carry(alone, read, folder / "one", Ranks())
    carry(read, other, folder / "again", ranks)
    carry(other, alone, folder / "other", ranks)
    places = [checkpoint_folder(folder / each, 1) for each in ("all", "one", "again", "other")]
    wholes = [Checkpoint(place, 1, {}).build_tensor_reader("model") for place in places]
    own = list(saved.training_state.stream())
    for name, start, each in own:
        for whole in wholes:
            assert torch.equal(whole(name, slice(start, start + len(each))), each), name
    own_bytes = sum(each.nbytes for _, _, each in own)
    total = saved.training_state.total_bytes
    assert sum(ranks.all_gather(own_bytes)) == total, "each element is saved once"
    assert own_bytes <= total / ranks.size + 4 * 4 * PADDING
    files = [path.relative_to(places[0]).as_posix() for path in places[0].rglob("*.safetensors")]
    assert sorted(files) == [f"model/rank-{n:05}/model.safetensors" for n in range(ranks.size)]


def main(stage: int, offload: str, folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    ranks = current_ranks(Device.cpu)
    zero = replace(PLAIN, stage=stage)
    if offload == "offload":
        zero = replace(zero, offload_optimizer=True, offload_parameters=stage == 3)
    for dtype in (Dtype.fp32, Dtype.bf16):
        check_average(ranks, zero, dtype)
        check_broken_gradient(ranks, zero, dtype)
    check_adapter_rate(ranks, zero)
    check_checkpoint(ranks, zero, folder)
    if stage > 0:
        check_overflow(ranks, zero)
    ranks.barrier()
    # At once: gloo's threads may abort a process that still holds engines when Python unwinds it.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
