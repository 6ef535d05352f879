"""An engine that runs one model on one rank in plain torch: one rank needs no sharding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.base.heartbeat import beat
from rlhf.base.ranks import Ranks
from rlhf.base.types import StepReport
from rlhf.config.choices import Dtype, MomentsDtype
from rlhf.config.roles import Role, has_16_bit_weights
from rlhf.engine.masters import Masters, round_to_bf16
from rlhf.engine.settings import EngineSettings, OptimizerSettings, parameter_groups
from rlhf.engine.split_adamw import SplitAdamW
from rlhf.engine.training_state import (
    AdamMoments,
    BaseEngine,
    TrainingState,
    adamw_moments,
    adamw_step_counts,
    set_adamw_step_counts,
    whole_pieces,
)

ALIGNMENT = 16  # bytes that a GPU loads at once; addresses of tensors are multiples of it


class WholeAdamW:
    """PyTorch's AdamW, for weights that are stored in fp32."""

    def __init__(
        self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float
    ) -> None:
        self._adamw = torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)
        self.param_groups = self._adamw.param_groups

    @property
    def masters(self) -> Masters:
        """Return the masters, which are the weights themselves."""
        return Masters(self._parameters(), lambda: None)

    @property
    def moments(self) -> list[AdamMoments]:
        """Return the moments of each parameter, in the order of the masters."""
        return [adamw_moments(self._adamw, each) for each in self._parameters()]

    def state_dict(self) -> dict[str, Any]:
        """Return AdamW's step counters, for a checkpoint."""
        return {"adamw_steps": adamw_step_counts(self._adamw, self._parameters())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state`` that ``state_dict`` returned."""
        set_adamw_step_counts(self._adamw, self._parameters(), state["adamw_steps"])

    def grad_norm(self) -> float:
        """Return the Euclidean norm of all gradients."""
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def step(self, *, scale: float = 1.0) -> None:
        """Take one step on the gradients times ``scale``."""
        if scale != 1.0:
            torch._foreach_mul_([p.grad for p in self._parameters() if p.grad is not None], scale)
        self._adamw.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._adamw.zero_grad()

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


class TorchEngine(BaseEngine):
    """An ``Engine`` that runs and trains one model on one rank.

    In bf16 the weights are bf16 with exact fp32 masters (``SplitAdamW``); at stage 0 they are fp32
    under autocast, as with DeepSpeed. Gradients of micro-batches accumulate in the weights'
    precision. A step whose gradient is not finite is skipped.
    """

    is_sharded = False

    def __init__(
        self,
        module: nn.Module,
        *,
        role: Role,
        settings: EngineSettings,
        ranks: Ranks,
        optimizer: OptimizerSettings | None = None,
    ) -> None:
        has_half = has_16_bit_weights(role, settings.zero, settings.dtype)
        is_bf16 = settings.dtype is Dtype.bf16
        super().__init__(casts_to_bf16=is_bf16 and not has_half, device=ranks.device)
        self.module = module.train(optimizer is not None)
        self._steps = 0
        self._settings = optimizer
        self._optimizer: SplitAdamW | WholeAdamW | None = None
        if optimizer is None:
            module.requires_grad_(requires_grad=False)
        dtype = torch.bfloat16 if has_half else torch.float32
        places = allocate_weights(list(module.parameters()), dtype, ranks.device)
        for parameter, place in places.items():
            if not has_half:
                parameter.data = place.copy_(parameter.data)
            elif not parameter.requires_grad:
                parameter.data = round_to_bf16(parameter.data, place)
        for buffer in module.buffers():
            buffer.data = buffer.data.to(ranks.device)
        if optimizer is None:
            return
        groups, betas, eps = parameter_groups(module, optimizer), optimizer.betas, optimizer.eps
        self._peak_lrs = [group["lr"] for group in groups]
        moments = torch.bfloat16 if settings.zero.moments is MomentsDtype.bf16 else torch.float32
        self._optimizer = (
            SplitAdamW(groups, betas=betas, eps=eps, moments=moments, places=places)
            if has_half
            else WholeAdamW(groups, betas=betas, eps=eps)
        )
        if optimizer.follow is not None:
            self.follower = optimizer.follow(self._optimizer.masters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass in the run's precision."""
        with self._autocast():
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch's ``loss`` to the gradients of this step."""
        beat()
        loss.backward()  # type: ignore[no-untyped-call]

    def has_overflow(self) -> bool:
        """Return False: this engine trains in bf16 or fp32, which do not overflow like fp16."""
        return False

    def step(self, *, discard: bool = False) -> StepReport:
        """Step the optimizer on the gradients of all micro-batches.

        With ``discard`` the gradients are dropped and no weight changes.
        """
        settings, optimizer = self._settings, self._optimizer
        assert settings is not None, "a frozen model takes no steps"
        assert optimizer is not None, "this engine is closed"
        share = settings.schedule(self._steps) * self.lr_scale
        for group, peak in zip(optimizer.param_groups, self._peak_lrs, strict=True):
            group["lr"] = share * peak
        grad_norm = optimizer.grad_norm()
        is_skipped = discard or not math.isfinite(grad_norm)
        if not is_skipped:
            limit = settings.max_grad_norm or math.inf
            optimizer.step(scale=min(1.0, limit / (grad_norm + 1e-6)))  # clips as torch does
            self._steps += 1
            if self.follower is not None:
                self.follower.update()
        optimizer.zero_grad()
        return StepReport(optimizer.param_groups[0]["lr"], grad_norm, is_skipped)

    @property
    def training_state(self) -> TrainingState:
        """Return the tensors that training changes."""
        optimizer = self._optimizer
        assert optimizer is not None, "this model does not learn"
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        pieces = whole_pieces({names[id(p)]: p for p in trained})
        masters, moments = optimizer.masters, optimizer.moments
        return TrainingState(pieces, masters, moments, self.follower, Ranks())

    def state_dict(self) -> dict[str, Any]:
        """Return the training state that is not in tensors, such as step counters."""
        assert self._optimizer is not None, "this model does not learn"
        return {"steps": self._steps, "lr_scale": self.lr_scale} | self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state`` that ``state_dict`` returned."""
        assert self._optimizer is not None, "this model does not learn"
        self._steps, self.lr_scale = state["steps"], state["lr_scale"]
        self._optimizer.load_state_dict(state)

    def close(self) -> None:
        """Drop gradients, optimizer and weight follower; the module can still be run."""
        self.module.zero_grad()
        self._optimizer = self.follower = None


def allocate_weights(
    parameters: Sequence[nn.Parameter], dtype: torch.dtype, device: torch.device
) -> dict[nn.Parameter, Tensor]:
    """Return the tensor in which each fp32 parameter will be stored on ``device``, as ``dtype``.

    On a GPU all are parts of one allocation, matrices first and then vectors, each in the order of
    the modules, as in DeepSpeed's flat buffers. Linear layers that follow one another, such as
    queries, keys and values, can then be computed as one (``rlhf.rollout.decoders.layers``).
    """
    if device.type == "cpu":
        is_same = dtype is torch.float32
        return {p: p.data if is_same else torch.empty(p.shape, dtype=dtype) for p in parameters}
    unit = ALIGNMENT // dtype.itemsize
    order = sorted(parameters, key=lambda parameter: parameter.dim() == 1)  # stable
    sizes = [math.ceil(parameter.numel() / unit) * unit for parameter in order]
    parts = torch.split(torch.empty(sum(sizes), dtype=dtype, device=device), sizes)
    return {p: part[: p.numel()].view(p.shape) for p, part in zip(order, parts, strict=True)}
