"""Learning rates of a real engine, and what no engine can do."""

import pytest
import torch

from rlhf.algorithms.schedule import build_lr_schedule
from rlhf.base.errors import CapabilityError
from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Device, Dtype
from rlhf.config.roles import Role
from rlhf.engine.deepspeed_engine import DeepSpeedEngine
from rlhf.engine.devices import current_ranks
from rlhf.engine.settings import EngineSettings
from tests.engine.test_deepspeed_config import zero
from tests.plain_engine import whole_state
from tests.zero_settings import adamw


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_a_share_of_the_learning_rate_is_taken_from_the_next_step_on(stage: int) -> None:
    linear = build_lr_schedule("linear", warmup_steps=0, total_steps=5, min_ratio=0.0)
    torch.manual_seed(0)
    engine = DeepSpeedEngine(
        torch.nn.Linear(3, 2),
        role=Role.actor,
        settings=EngineSettings(zero=zero(stage=stage), dtype=Dtype.fp32),
        plan=BatchPlan(per_rank=1, micro=1, accumulation=1),
        ranks=current_ranks(Device.cpu),
        optimizer=adamw(betas=(0.0, 0.0), eps=1e-12, max_grad_norm=0.0, schedule=linear),
    )
    reported, moved = [], []
    for scale in (1.0, 0.5, 0.5, 1.0):
        engine.lr_scale = scale
        before = whole_state(engine)["weight"]
        engine.backward(engine(torch.ones(1, 3)).square().sum())
        report = engine.step()
        assert report is not None
        reported.append(report.learning_rate)
        after = whole_state(engine)["weight"]
        moved.append((after - before).abs().max().item())  # Adam without memory: the rate itself
    expected = [0.1, 0.5 * 0.075, 0.5 * 0.05, 0.025]
    assert reported == pytest.approx(expected)
    assert moved == pytest.approx(expected, rel=1e-3)
    engine.close()


@pytest.mark.parametrize(("stage", "critic_stage"), [(0, None), (0, 2), (3, 0)])
def test_fp16_without_masters_is_refused(stage: int, critic_stage: int | None) -> None:
    own = "null" if critic_stage is None else critic_stage
    message = rf"fp16 with zero\.stage={stage} and zero\.critic_stage={own}: .* use zero=stage1"
    with pytest.raises(CapabilityError, match=message):
        EngineSettings(zero=zero(stage=stage, critic_stage=critic_stage), dtype=Dtype.fp16)
    EngineSettings(zero=zero(stage=1, critic_stage=2), dtype=Dtype.fp16)
