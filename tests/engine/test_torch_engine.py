"""The engine in plain torch: the same run as DeepSpeed's, and what it alone keeps to."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.algorithms.schedule import build_lr_schedule
from rlhf.base.errors import CapabilityError
from rlhf.base.ranks import Ranks
from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Device, Dtype, MomentsDtype, TrainingEngine
from rlhf.config.roles import Role
from rlhf.engine.deepspeed_engine import DeepSpeedEngine
from rlhf.engine.devices import current_ranks
from rlhf.engine.select import build_engine
from rlhf.engine.settings import EngineSettings, OptimizerSettings
from rlhf.engine.torch_engine import TorchEngine
from rlhf.options.average.moving_average import MovingAverage
from rlhf.options.replay.weight_digests import digest_of_slice
from tests.engine.test_deepspeed_config import zero
from tests.plain_engine import whole_state
from tests.zero_settings import adamw

LINEAR = build_lr_schedule("linear", warmup_steps=2, total_steps=9, min_ratio=0.1)
ADAMW = adamw(
    lr=0.02,
    weight_decay=0.1,
    lr_of=lambda name: 0.05 if "lora_" in name else None,
    follow=partial(MovingAverage, beta=0.75),
    max_grad_norm=0.5,
    schedule=LINEAR,
)


class Net(nn.Module):
    """A frozen layer, an adapter with its own rate, a layer with dropout, and an idle one."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.frozen = nn.Linear(5, 33).requires_grad_(requires_grad=False)
        self.lora_top = nn.Linear(33, 9)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(9, 3)
        self.register_buffer("shift", torch.full((3,), 0.5))
        self.register_buffer("fleeting", torch.zeros(2), persistent=False)

    def forward(self, x_BI: Tensor) -> Tensor:
        hidden_BH = self.dropout(nn.functional.gelu(self.lora_top(self.frozen(x_BI))))
        return self.head(hidden_BH) + self.shift


def engine_of(
    kind: Any = TorchEngine,
    *,
    stage: int = 1,
    dtype: Dtype = Dtype.bf16,
    optimizer: OptimizerSettings | None = ADAMW,
    module: nn.Module | None = None,
    ranks: Ranks | None = None,
    role: Role = Role.actor,
    **changes: Any,
) -> Any:
    plan = BatchPlan(per_rank=4, micro=2, accumulation=2)
    return kind(
        Net() if module is None else module,
        role=role if optimizer else Role.reference,
        settings=EngineSettings(zero=zero(stage=stage, **changes), dtype=dtype),
        **({} if kind is TorchEngine else {"plan": plan}),
        ranks=current_ranks(Device.cpu) if ranks is None else ranks,
        optimizer=optimizer,
    )


def inputs(step: int) -> Tensor:
    return torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(step))


def backward(engine: Any, x_BI: Tensor, *, scale: float = 1.0) -> float:
    """The loss of one micro-batch, whose gradient is added."""
    x_BI = x_BI.to(next(engine.module.parameters()).dtype)
    loss = scale * engine(x_BI).float().square().sum()
    engine.backward(loss)
    return float(loss.detach())


def train(engine: Any, step: int, *, discard: bool = False, scale: float = 1.0) -> Any:
    """The losses and the report of one optimiser step of two micro-batches."""
    losses = [backward(engine, x_BI, scale=scale) for x_BI in inputs(step)]
    return losses, engine.step(discard=discard)


def weights(engine: Any) -> dict[str, Tensor]:
    return {name: w.float() for name, w in whole_state(engine).items()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize(
    ("stage", "dtype", "tolerance"),
    [
        (0, Dtype.fp32, 1e-6),
        (1, Dtype.fp32, 1e-6),
        (0, Dtype.bf16, 1e-6),  # fp32 weights under autocast
        (1, Dtype.bf16, 2**-7),  # DeepSpeed adds up and clips gradients in other precisions
    ],
)
def test_a_run_is_that_of_deepspeed(stage: int, dtype: Dtype, tolerance: float) -> None:
    ours, theirs = (
        engine_of(kind, stage=stage, dtype=dtype) for kind in (TorchEngine, DeepSpeedEngine)
    )
    before = weights(ours)
    for step in range(6):
        ours.lr_scale = theirs.lr_scale = 0.5 if step == 3 else 1.0
        (losses, report), (expected_losses, expected) = train(ours, step), train(theirs, step)
        assert losses == pytest.approx(expected_losses, rel=4 * tolerance)
        assert report.learning_rate == pytest.approx(expected.learning_rate)
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=4 * tolerance)
        assert expected.grad_norm > ADAMW.max_grad_norm  # every step is clipped
        assert not report.is_skipped
        torch.testing.assert_close(weights(ours), weights(theirs), atol=tolerance, rtol=tolerance)
    with ours.follower.swap_in(), theirs.follower.swap_in():
        torch.testing.assert_close(weights(ours), weights(theirs), atol=tolerance, rtol=tolerance)
    moved = (weights(ours)["head.weight"] - before["head.weight"]).abs().max()
    assert moved > 20 * tolerance * before["head.weight"].abs().max()
    theirs.close()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_discarded_step_changes_nothing_and_keeps_the_schedule(stage: int) -> None:
    engine, same = engine_of(stage=stage), engine_of(stage=stage)
    train(engine, 0)
    train(same, 0)
    before = weights(engine)
    _, report = train(engine, 1, discard=True)
    assert report.is_skipped
    assert report.grad_norm > 0
    assert equal(weights(engine), before)
    _, following = train(engine, 2)
    assert following == train(same, 2)[1]
    assert following.learning_rate == report.learning_rate
    assert equal(weights(engine), weights(same))  # moments and average have not seen it either
    with engine.follower.swap_in(), same.follower.swap_in():
        assert equal(weights(engine), weights(same))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_skipped(stage: int, scale: float) -> None:
    engine = engine_of(stage=stage)
    before = weights(engine)
    _, report = train(engine, 0, scale=scale)
    assert report.is_skipped
    assert not engine.has_overflow()
    assert equal(weights(engine), before)
    _, report = train(engine, 0)
    assert not report.is_skipped
    assert report.learning_rate == pytest.approx(max(LINEAR(0) * rate for rate in (0.02, 0.05)))
    assert not equal(weights(engine), before)


def test_a_frozen_copy_computes_with_the_weights_of_the_trained_one() -> None:
    # Each fp32 number lies in the middle between two bf16 ones: 0x8000 behind an even or odd half.
    halves = torch.arange(0x3F00, 0x3F00 + 33 * 9, dtype=torch.int32).view(9, 33)
    ties = ((halves << 16) + 0x8000).view(torch.float32)
    engines = []
    for optimizer in (ADAMW, None):
        module = Net()
        module.lora_top.weight.data = ties.clone()
        engines.append(engine_of(module=module, optimizer=optimizer))
    trained, frozen = map(weights, engines)
    assert equal(trained, frozen)
    assert not torch.equal(frozen["lora_top.weight"], ties.bfloat16().float()), "they were ties"


def test_clipping_is_off_at_0() -> None:
    """Without it Adam's first step is as long, but the second moments differ from then on."""
    free, clipped = (
        engine_of(stage=0, optimizer=replace(ADAMW, max_grad_norm=norm)) for norm in (0.0, 0.5)
    )
    for engine in (free, clipped):
        train(engine, 0)
    seen = [engine._optimizer._adamw.state[engine.module.head.bias] for engine in (free, clipped)]
    norm = train(engine_of(stage=0), 0)[1].grad_norm
    ratio = seen[0]["exp_avg"] / seen[1]["exp_avg"]
    torch.testing.assert_close(ratio, torch.full((3,), norm / 0.5), rtol=1e-4, atol=0.0)


def test_half_moments_stay_close_to_whole_ones() -> None:
    half, whole = engine_of(moments=MomentsDtype.bf16), engine_of()
    for step in range(8):
        losses, report = train(half, step)
        expected_losses, expected = train(whole, step)
        assert losses == pytest.approx(expected_losses, rel=0.05)
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    first = half._optimizer._states[0].first
    assert first.dtype is torch.bfloat16
    torch.testing.assert_close(weights(half), weights(whole), atol=5e-3, rtol=2**-6)


@pytest.mark.parametrize("stage", [0, 1])
def test_whole_state_is_a_copy_of_what_is_saved(stage: int) -> None:
    engine = engine_of(stage=stage)
    state = whole_state(engine)
    assert state.keys() == engine.module.state_dict().keys()
    assert "fleeting" not in state
    assert whole_state(engine, engine.module.head).keys() == {"weight", "bias"}
    kept = {name: tensor.clone() for name, tensor in state.items()}
    train(engine, 0)
    assert equal(state, kept)
    assert not equal(weights(engine), {name: t.float() for name, t in kept.items()})


def test_evaluating_is_without_dropout_and_gradients_and_gives_them_back() -> None:
    engine = engine_of(module=Net(dropout=0.5))
    x_BI = inputs(0)[0].bfloat16()
    with engine.evaluating() as module:
        assert torch.equal(module(x_BI), engine(x_BI))
        assert not module(x_BI).requires_grad
    assert not torch.equal(engine(x_BI), engine(x_BI))
    assert engine(x_BI).requires_grad
    with pytest.raises(ZeroDivisionError), engine.evaluating():
        raise ZeroDivisionError
    assert engine.module.training
    with engine.gather_parameters(engine.module):
        assert not engine.is_sharded


@pytest.mark.parametrize(
    ("stage", "dtype", "kept", "computed"),
    [
        (0, Dtype.fp32, torch.float32, torch.float32),
        (1, Dtype.fp32, torch.float32, torch.float32),
        (0, Dtype.bf16, torch.float32, torch.bfloat16),
        (1, Dtype.bf16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_precisions_trained_and_frozen(
    stage: int, dtype: Dtype, kept: torch.dtype, computed: torch.dtype
) -> None:
    for optimizer in (ADAMW, None):
        engine = engine_of(stage=stage, dtype=dtype, optimizer=optimizer)
        assert {p.dtype for p in engine.module.parameters()} == {kept}
        with engine._autocast():
            assert engine.module.head(torch.zeros(1, 9, dtype=kept)).dtype is computed
        assert engine.module.training == (optimizer is not None)
        assert engine.module.head.weight.requires_grad == (optimizer is not None)


def test_a_frozen_model_takes_no_steps() -> None:
    engine = engine_of(optimizer=None)
    assert not any(p.requires_grad for p in engine.module.parameters())
    with pytest.raises(AssertionError, match="a frozen model takes no steps"):
        engine.step()
    assert engine.follower is None


def test_a_closed_engine_keeps_only_its_model() -> None:
    engine = engine_of()
    train(engine, 0)
    backward(engine, inputs(1)[0])
    before = weights(engine)
    engine.close()
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    held = [value for value in vars(engine).values() if isinstance(value, (nn.Module, Tensor))]
    assert held == [engine.module]
    assert engine._optimizer is None
    assert engine.follower is None
    assert equal(weights(engine), before)
    with pytest.raises(AssertionError, match="this engine is closed"):
        engine.step()


@pytest.mark.parametrize(
    ("changes", "dtype", "kind"),
    [
        ({}, Dtype.fp32, TorchEngine),
        ({"stage": 3}, Dtype.bf16, TorchEngine),
        ({"stage": 1, "moments": MomentsDtype.bf16}, Dtype.bf16, TorchEngine),
        ({"engine": TrainingEngine.torch}, Dtype.bf16, TorchEngine),
        ({"engine": TrainingEngine.deepspeed}, Dtype.fp32, DeepSpeedEngine),
        ({"extra": {"prescale_gradients": False}}, Dtype.fp32, DeepSpeedEngine),
    ],
)
def test_the_engine_that_is_built(changes: dict[str, Any], dtype: Dtype, kind: type) -> None:
    stage = changes.get("stage", 0)
    rest = {key: value for key, value in changes.items() if key != "stage"}
    engine = engine_of(build_engine, stage=stage, dtype=dtype, **rest)
    assert type(engine) is kind
    engine.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero.offload_optimizer", "true"),
        ("zero.offload_parameters", "true"),
        ("zero.offload_reference", "true"),
        ("zero.offload_reward", "true"),
        ("zero.quantize_frozen_weights", "true"),
        ("zero.hpz_partition_size", 2),
        ("zero.extra", {"a": 1}),
        ("hardware.dtype", "fp16"),
        ("hardware.nodes*hardware.ranks_per_node", 2),
    ],
)
def test_what_torch_cannot_do_is_named(key: str, value: Any) -> None:
    options: dict[str, Any] = {"dtype": Dtype.fp16 if value == "fp16" else Dtype.bf16}
    if key.startswith("zero."):
        options[key.removeprefix("zero.")] = True if value == "true" else value
    elif "ranks" in key:
        options["ranks"] = Ranks(size=2)
    for asked, message in (
        ({"engine": TrainingEngine.torch}, f"zero.engine=torch with {key}={value}: "),
        ({"moments": MomentsDtype.bf16}, f"zero.moments=bf16 with {key}={value} and "),
    ):
        with pytest.raises(CapabilityError) as caught:
            engine_of(build_engine, **options, **asked)
        assert message in str(caught.value)
        assert re.search("use zero.(engine=auto|moments=fp32)$", str(caught.value))


@pytest.mark.parametrize(
    ("stage", "dtype", "engine"),
    [
        (1, Dtype.fp32, TrainingEngine.auto),
        (0, Dtype.bf16, TrainingEngine.torch),
        (1, Dtype.bf16, TrainingEngine.deepspeed),
    ],
)
def test_half_moments_need_half_masters(stage: int, dtype: Dtype, engine: TrainingEngine) -> None:
    message = (
        f"zero.moments=bf16 with zero.engine={engine} and hardware.dtype={dtype} in the actor "
        f"at stage {stage}: "
    )
    with pytest.raises(CapabilityError, match=re.escape(message)):
        engine_of(build_engine, stage=stage, dtype=dtype, engine=engine, moments=MomentsDtype.bf16)


def test_a_critic_at_stage_0_has_no_half_moments() -> None:
    options = {"moments": MomentsDtype.bf16, "critic_stage": 0}
    engine_of(build_engine, **options)  # the actor has
    with pytest.raises(CapabilityError, match="in the critic at stage 0"):
        engine_of(build_engine, role=Role.critic, **options)
    engine_of(build_engine, optimizer=None, dtype=Dtype.fp32, **options)  # frozen: it has none


@pytest.mark.parametrize(("stage", "critic_stage"), [(0, None), (0, 2), (3, 0)])
def test_fp16_without_masters_is_refused(stage: int, critic_stage: int | None) -> None:
    own = "null" if critic_stage is None else critic_stage
    message = rf"fp16 with zero\.stage={stage} and zero\.critic_stage={own}: .* use zero=stage1"
    with pytest.raises(CapabilityError, match=message):
        EngineSettings(zero=zero(stage=stage, critic_stage=critic_stage), dtype=Dtype.fp16)
    EngineSettings(zero=zero(stage=1, critic_stage=2), dtype=Dtype.fp16)


def test_digests_of_slices_add_up_and_notice_every_change() -> None:
    whole_N = torch.randn(1000)
    parts = digest_of_slice(whole_N[:300], 0) + digest_of_slice(whole_N[300:], 300)
    assert parts == digest_of_slice(whole_N, 0)
    for place in (0, 299, 999):
        changed_N = whole_N.clone()
        changed_N.view(torch.int32)[place] ^= 1  # the lowest bit
        assert digest_of_slice(changed_N, 0) != parts
    assert digest_of_slice(whole_N.flip(0), 0) != parts
