"""One model under DeepSpeed, trained or frozen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.config.checks import BatchPlan
from rlhf.config.choices import Dtype
from rlhf.config.schema import ZeroConfig
from rlhf.engine.ds_config import (
    SHARDED_PARAMETERS,
    Role,
    deepspeed_config,
    has_half_weights,
    stage_of,
)
from rlhf.engine.masters import MovingAverage, masters_of
from rlhf.errors import CapabilityError
from rlhf.types import Ranks, Schedule, StepReport


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What all engines of a run have in common; ``dtype`` is resolved, never auto.

    Raises:
        CapabilityError: fp16 at stage 0, where nothing keeps the fp32 masters that it needs.
    """

    zero: ZeroConfig
    dtype: Dtype

    def __post_init__(self) -> None:
        """Refuse what no optimiser here can do."""
        if self.dtype is Dtype.fp16 and 0 in (self.zero.stage, self.zero.critic_stage):
            raise CapabilityError(
                f"hardware.dtype=fp16 with zero.stage={self.zero.stage} and zero.critic_stage="
                f"{'null' if self.zero.critic_stage is None else self.zero.critic_stage}: fp16 "
                "needs the fp32 masters that DeepSpeed keeps from stage 1 on; use zero=stage1, "
                "which costs nothing on one rank, or hardware.dtype=fp32"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW of one trained model; ``schedule`` gives shares of the peak ``lr``.

    ``adapter_lr`` is the peak of LoRA's adapters (None: ``lr``); with ``ema_beta`` above 0 a moving
    average of the weights is kept.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    adapter_lr: float | None = None
    ema_beta: float = 0.0
    max_grad_norm: float
    schedule: Schedule


class DeepSpeedEngine:
    """Runs, trains and unshards one model; an ``Engine``.

    Gradients *add* over micro-batches and ranks (DeepSpeed itself averages them): a caller that
    divides its loss sums by the count of the whole batch gets the same step however the batch is
    cut.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        role: Role,
        settings: EngineSettings,
        plan: BatchPlan,
        ranks: Ranks,
        optimizer: OptimizerSettings | None = None,
    ) -> None:
        stage = stage_of(role, settings.zero)
        has_half = has_half_weights(role, settings.zero, settings.dtype)
        self._casts_to_bf16 = settings.dtype is Dtype.bf16 and not has_half
        self._may_overflow = settings.dtype is Dtype.fp16
        self._measures_norm = stage > 0
        self._num_parts = plan.accumulation * ranks.size
        self._device = ranks.device
        self.is_sharded = stage == SHARDED_PARAMETERS
        self.lr_scale = 1.0
        config = deepspeed_config(
            role,
            zero=settings.zero,
            dtype=settings.dtype,
            plan=plan,
            max_grad_norm=optimizer.max_grad_norm if optimizer else 0.0,
        )
        self._deepspeed = self._initialize(module, config, optimizer)
        self.module: nn.Module = self._deepspeed.module
        self._average: MovingAverage | None = None
        if optimizer is not None and optimizer.ema_beta:
            masters = masters_of(self._deepspeed, stage=stage)
            self._average = MovingAverage(masters, beta=optimizer.ema_beta)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass in the run's precision."""
        with self._autocast():
            return self._deepspeed(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` to that of the step so far."""
        self._deepspeed.backward(loss * self._num_parts)

    @property
    def is_step_due(self) -> bool:
        """True when the next step() is the optimiser's: all micro-batches are in."""
        return bool(self._deepspeed.is_gradient_accumulation_boundary())

    def has_overflow(self) -> bool:
        """True where fp16 gradients have overflowed on any rank; ask when a step is due."""
        return self._may_overflow and bool(self._deepspeed.optimizer.has_overflow())

    def step(self, *, discard: bool = False) -> StepReport | None:
        """Step the optimiser when all micro-batches are in; None while they are not.

        With ``discard`` the gradients are dropped and no weight changes, as after an overflow; the
        loss scale stays.
        """
        if not self.is_step_due:
            self._deepspeed.step()
            return None
        self._scale_learning_rates()
        learning_rate = self._deepspeed.get_lr()[0]
        skipped_before = self._deepspeed.skipped_steps
        grad_norm = 0.0 if self._measures_norm else self._unsharded_norm()
        with self._discarding() if discard else nullcontext():
            self._deepspeed.step()
        if self._measures_norm:
            grad_norm = float(self._deepspeed.get_global_grad_norm() or 0.0)
        is_skipped = self._deepspeed.skipped_steps > skipped_before
        if self._average is not None and not is_skipped:
            self._average.update()
        return StepReport(learning_rate, grad_norm, is_skipped)

    def _scale_learning_rates(self) -> None:
        """The schedule's rates times ``lr_scale`` as it is now: for this step, not for the next."""
        scheduled = self._deepspeed.lr_scheduler.get_last_lr()
        for group, lr in zip(self._deepspeed.optimizer.param_groups, scheduled, strict=True):
            group["lr"] = self.lr_scale * lr

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        """DeepSpeed takes the gradients to have overflowed, and leaves its loss scale alone."""
        optimizer = self._deepspeed.optimizer
        scaler = vars(optimizer.loss_scaler).copy()
        optimizer.has_overflow = lambda *_: True
        try:
            yield
        finally:
            del optimizer.has_overflow
            vars(optimizer.loss_scaler).update(scaler)

    def averaged(self) -> AbstractContextManager[None]:
        """The moving average of the weights in their place; every rank must enter and leave."""
        assert self._average is not None, "this engine keeps no average: ema_beta is 0"
        return self._average.in_place()

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The module without dropout and gradients, for as long as the context lasts."""
        was_training = self.module.training
        self._deepspeed.eval()
        try:
            with torch.no_grad(), self._autocast():
                yield self.module
        finally:
            self._deepspeed.train(was_training)

    @contextmanager
    def gathered(self, of: nn.Module) -> Iterator[None]:
        """All parameters of ``of`` whole on every rank; every rank must enter and leave."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(of.parameters()), enabled=self.is_sharded):
            yield

    def whole_state(self, of: nn.Module) -> dict[str, Tensor]:
        """Copies of the parameters and persistent buffers of ``of``, the module or a part of it.

        Every rank must call it; sharded parameters are gathered one at a time, so no rank holds
        more than this copy.
        """
        import deepspeed

        state: dict[str, Tensor] = {}
        for name, parameter in of.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.is_sharded):
                state[name] = parameter.detach().cpu().clone()
        persistent = of.state_dict().keys()
        buffers = {n: b.cpu().clone() for n, b in of.named_buffers() if n in persistent}
        return state | buffers

    def close(self) -> None:
        """Take DeepSpeed's hooks off the module and free its buffers."""
        self._deepspeed.destroy()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._casts_to_bf16)

    def _unsharded_norm(self) -> float:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def _initialize(
        self, module: nn.Module, config: dict[str, Any], optimizer: OptimizerSettings | None
    ) -> Any:
        import deepspeed

        if optimizer is None:
            module.requires_grad_(requires_grad=False)
            adamw, scheduler = None, None
        else:
            adamw = torch.optim.AdamW(
                _parameter_groups(module, optimizer),
                lr=optimizer.lr,
                betas=optimizer.betas,
                eps=optimizer.eps,
                fused=True,
            )
            scheduler = torch.optim.lr_scheduler.LambdaLR(adamw, optimizer.schedule)
        # DeepSpeed 0.19.8 prints its memory use at every start; what it logs still comes through.
        with redirect_stdout(StringIO()):
            engine = deepspeed.initialize(
                model=module, optimizer=adamw, lr_scheduler=scheduler, config=config
            )[0]
        engine.train(mode=optimizer is not None)
        return engine


def _parameter_groups(module: nn.Module, optimizer: OptimizerSettings) -> list[dict[str, Any]]:
    """Matrices decay; biases and the weights of norms, which are vectors, do not."""
    groups: defaultdict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_adapter = "lora_" in name  # peft's name
            lr = optimizer.adapter_lr if is_adapter and optimizer.adapter_lr else optimizer.lr
            decay = optimizer.weight_decay if parameter.ndim > 1 else 0.0
            groups[lr, decay].append(parameter)
    return [
        {"params": parameters, "lr": lr, "weight_decay": decay}
        for (lr, decay), parameters in groups.items()
    ]
