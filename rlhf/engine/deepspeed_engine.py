"""An engine that runs one model with DeepSpeed, trained or frozen."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.base.errors import CapabilityError
from rlhf.base.heartbeat import beat
from rlhf.base.ranks import Ranks
from rlhf.base.types import StepReport
from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Dtype
from rlhf.config.roles import SHARDED_WEIGHTS, Role, has_16_bit_weights, stage_of
from rlhf.engine.deepspeed_config import deepspeed_config
from rlhf.engine.masters import Masters, find_deepspeed_masters
from rlhf.engine.settings import EngineSettings, OptimizerSettings, parameter_groups
from rlhf.engine.training_state import (
    BaseEngine,
    TrainingState,
    adamw_moments,
    adamw_step_counts,
    deepspeed_pieces,
    set_adamw_step_counts,
)
from rlhf.engine.zero3_partition import skip_shm_kernel_compilation
from rlhf.options import ZeroConfig

DRIVE_BLOCK = 512  # bytes per block that a drive reads or writes


class DeepSpeedEngine(BaseEngine):
    """An ``Engine`` that runs, trains and gathers one model with DeepSpeed.

    Gradients are *summed* over micro-batches and ranks (DeepSpeed itself averages them): a caller
    that divides its sums of losses by the size of the whole batch gets the same step however this
    batch is split.
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
        require_quantizer(settings.zero)
        stage = stage_of(role, settings.zero)
        has_half = has_16_bit_weights(role, settings.zero, settings.dtype)
        is_bf16 = settings.dtype is Dtype.bf16
        super().__init__(casts_to_bf16=is_bf16 and not has_half, device=ranks.device)
        self._may_overflow = settings.dtype is Dtype.fp16
        self._num_micro_batches = plan.accumulation * ranks.size
        self.is_sharded = stage == SHARDED_WEIGHTS
        config = deepspeed_config(
            role,
            zero=settings.zero,
            dtype=settings.dtype,
            plan=plan,
            max_grad_norm=optimizer.max_grad_norm if optimizer else 0.0,
            ranks=ranks.size,
            actor_sections=settings.actor_sections,
        )
        if self._casts_to_bf16:
            # Autocast inside DeepSpeed's forward pass: DeepSpeed disables an autocast around it.
            module.forward = self._autocast()(module.forward)
        self._deepspeed = self._initialize_deepspeed(module, config, optimizer)
        self.module: nn.Module = self._deepspeed.module
        self._ranks, self._stage = ranks, stage
        if optimizer is not None and optimizer.follow is not None:
            self.follower = optimizer.follow(self._masters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass in the run's precision."""
        return self._deepspeed(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch's ``loss`` to the gradients of this step.

        DeepSpeed counts micro-batches by the calls of its ``step``. This method calls it after each
        micro-batch except the last, after which this engine's ``step`` calls it.
        """
        beat()
        self._deepspeed.backward(loss * self._num_micro_batches)
        if not self._deepspeed.is_gradient_accumulation_boundary():
            self._deepspeed.step()

    def has_overflow(self) -> bool:
        """Return True if fp16 gradients have overflowed on any rank; call it before ``step``."""
        return self._may_overflow and bool(self._deepspeed.optimizer.has_overflow())

    def step(self, *, discard: bool = False) -> StepReport:
        """Step the optimizer on the gradients of all micro-batches of the plan.

        With ``discard`` the gradients are dropped and no weight changes, as after an overflow, but
        the loss scale is kept. A step whose gradient is not finite is skipped on all ranks.
        """
        is_due = self._deepspeed.is_gradient_accumulation_boundary()
        assert is_due, "micro-batches of the plan are missing"
        self._set_scheduled_learning_rates()
        learning_rate = self._deepspeed.get_lr()[0]
        skipped_before = self._deepspeed.skipped_steps
        grad_norm = 0.0 if self._stage else self._unsharded_grad_norm()
        with self._force_overflow() if discard else self._skip_if_not_finite(grad_norm):
            self._deepspeed.step()
        if self._stage:
            grad_norm = float(self._deepspeed.get_global_grad_norm() or 0.0)
        is_skipped = self._deepspeed.skipped_steps > skipped_before
        if self.follower is not None and not is_skipped:
            self.follower.update()
        return StepReport(learning_rate, grad_norm, is_skipped)

    def _set_scheduled_learning_rates(self) -> None:
        """Set the learning rates of this step: the scheduled rates times ``lr_scale``."""
        scheduled = self._deepspeed.lr_scheduler.get_last_lr()
        for group, lr in zip(self._deepspeed.optimizer.param_groups, scheduled, strict=True):
            group["lr"] = self.lr_scale * lr

    @contextmanager
    def _force_overflow(self) -> Iterator[None]:
        """Make DeepSpeed treat the gradients as overflowed without changing its loss scale."""
        optimizer = self._deepspeed.optimizer
        scaler = vars(optimizer.loss_scaler).copy()
        optimizer.has_overflow = lambda *_: True
        try:
            yield
        finally:
            del optimizer.has_overflow
            vars(optimizer.loss_scaler).update(scaler)

    @contextmanager
    def _skip_if_not_finite(self, unsharded_norm: float) -> Iterator[None]:
        """Skip the optimizer's step if the norm is not finite, as DeepSpeed does from stage 1 on.

        At stage 0 plain AdamW would write NaN into the weights.
        """
        if math.isfinite(unsharded_norm):
            yield
            return
        optimizer = self._deepspeed.optimizer
        step, optimizer.step, optimizer.overflow = optimizer.step, lambda *_: None, True
        try:
            yield
        finally:
            optimizer.step = step
            del optimizer.overflow

    @property
    def training_state(self) -> TrainingState:
        """Return the tensors that training changes; not available with NVMe."""
        pieces = deepspeed_pieces(self._deepspeed, self._ranks, stage=self._stage)
        moments = [adamw_moments(self._adamw, shard) for shard in self._shards]
        copies = Ranks() if self._stage else self._ranks  # at stage 0 every rank has whole tensors
        return TrainingState(pieces, self._masters, moments, self.follower, copies)

    def state_dict(self) -> dict[str, Any]:
        """Return the training state that is not in tensors, such as step counters."""
        # Only an optimizer of stage 1 or higher scales losses.
        scaler = getattr(self._deepspeed.optimizer, "loss_scaler", None)
        scaler_fields = {} if scaler is None else vars(scaler)
        return {
            "lr_scale": self.lr_scale,
            "steps": self._deepspeed.lr_scheduler.last_epoch,
            "adamw_steps": adamw_step_counts(self._adamw, self._shards),
            "loss_scaler": {k: v for k, v in scaler_fields.items() if isinstance(v, int | float)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state`` that ``state_dict`` returned."""
        self.lr_scale = state["lr_scale"]
        scheduler = self._deepspeed.lr_scheduler
        scheduler.last_epoch = state["steps"]
        scheduler._step_count = state["steps"] + 1
        scheduler._last_lr = scheduler.get_lr()
        set_adamw_step_counts(self._adamw, self._shards, state["adamw_steps"])
        if scaled := state.get("loss_scaler"):
            vars(self._deepspeed.optimizer.loss_scaler).update(scaled)

    @property
    def _masters(self) -> Masters:
        return find_deepspeed_masters(self._deepspeed, stage=self._stage)

    @property
    def _shards(self) -> list[Tensor]:
        """Return the shards of the masters, which are AdamW's parameters."""
        return [shard for shard in self._masters.shards if isinstance(shard, Tensor)]

    @property
    def _adamw(self) -> torch.optim.AdamW:
        """Return torch's optimizer, which DeepSpeed wraps from stage 1 on."""
        optimizer = self._deepspeed.optimizer
        adamw = optimizer.optimizer if self._stage else optimizer
        assert isinstance(adamw, torch.optim.AdamW)
        return adamw

    def _set_train_mode(self, *, mode: bool) -> None:
        self._deepspeed.train(mode)

    def _gather(self, tensors: list[Tensor]) -> AbstractContextManager[None]:
        import deepspeed

        sharded = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
        gathered: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(sharded)
        return gathered if sharded else nullcontext()

    def close(self) -> None:
        """Remove DeepSpeed's hooks from the module and free its buffers."""
        self._deepspeed.destroy()

    def _unsharded_grad_norm(self) -> float:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def _initialize_deepspeed(
        self, module: nn.Module, config: dict[str, Any], optimizer: OptimizerSettings | None
    ) -> Any:
        import deepspeed

        skip_shm_kernel_compilation()
        section = config["zero_optimization"]
        _require_nvme_support(section)
        for buffer in module.buffers():  # DeepSpeed does not move buffers at stage 3
            buffer.data = buffer.data.to(self._device)
        if optimizer is None:
            module.requires_grad_(requires_grad=False)
            adamw, scheduler = None, None
        else:
            adamw = torch.optim.AdamW(
                parameter_groups(module, optimizer),
                lr=optimizer.lr,
                betas=optimizer.betas,
                eps=optimizer.eps,
                fused=True,
            )
            scheduler = torch.optim.lr_scheduler.LambdaLR(adamw, optimizer.schedule)
        quantizes = section.get("zero_quantized_nontrainable_weights", False)
        frozen = [p for p in module.parameters() if quantizes and not p.requires_grad]
        # DeepSpeed 0.19.8 prints its memory use at every start; its log messages stay visible.
        with redirect_stdout(StringIO()), _mark_as_trained(frozen):
            engine = deepspeed.initialize(
                model=module, optimizer=adamw, lr_scheduler=scheduler, config=config
            )[0]
        if frozen:
            engine.optimizer.quantize_nontrainable_params()
        if getattr(engine.optimizer, "swap_optimizer", False):
            require_aligned_nvme_gradients(engine.optimizer)
        engine.train(mode=optimizer is not None)
        return engine


@contextmanager
def _mark_as_trained(frozen: list[nn.Parameter]) -> Iterator[None]:
    """Mark frozen weights as trained so that DeepSpeed shards them in their own precision.

    DeepSpeed 0.19.8 casts frozen weights to int8 shards without a scale, which leaves zeros. The
    later call of quantize_nontrainable_params quantizes them with scales.
    """
    for parameter in frozen:
        parameter.requires_grad = True
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad = False


def _require_nvme_support(section: dict[str, Any]) -> None:
    """Check that this machine can offload to NVMe drives, if ``section`` configures that.

    Raises:
        CapabilityError: if DeepSpeed's async_io cannot be built (the message names what to
            install), or the folder cannot be created.
    """
    for offload in (section.get("offload_param", {}), section.get("offload_optimizer", {})):
        if offload.get("device") != "nvme":
            continue
        folder = Path(offload["nvme_path"])
        if not _has_async_io():
            raise CapabilityError(
                f"zero.nvme_path={folder.parent}: DeepSpeed cannot build its async_io here; "
                "install libaio (apt install libaio-dev), or use zero=stage3_offload"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CapabilityError(
                f"zero.nvme_path={folder.parent}: {error.strerror}; use a writable folder on a "
                "drive of every node"
            ) from error


def _has_async_io() -> bool:
    """Return True if DeepSpeed finds the compiler and the library that its async_io needs."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    from deepspeed.ops.op_builder.builder import probe_is_compatible

    return "async_io" in ALL_OPS and bool(probe_is_compatible(ALL_OPS["async_io"]))


def require_aligned_nvme_gradients(optimizer: Any) -> None:
    """Raise CapabilityError if DeepSpeed 0.19.8 would silently mix up gradients on NVMe.

    DeepSpeed reads each gradient from the drive into a slice of a flat fp32 buffer. Drives transfer
    only whole blocks, so each slice must start where a block of the buffer starts.
    """
    swaps = optimizer.optimizer_swapper.is_swappable_tensor
    for _, start, size in optimizer.grad_position.values():
        if swaps(numel=size) and 4 * start % DRIVE_BLOCK:
            raise CapabilityError(
                "zero.nvme_path with zero.offload_optimizer=true: a gradient of this model would "
                f"start {4 * start % DRIVE_BLOCK} bytes into a block of {DRIVE_BLOCK}, where "
                "DeepSpeed cannot read it; use another number of ranks, or zero=stage3_offload"
            )


def require_quantizer(zero: ZeroConfig) -> None:
    """Raise CapabilityError if ``zero`` needs DeepSpeed's quantizer and it cannot be compiled."""
    keys = ("quantize_weights", "quantize_gradients", "quantize_frozen_weights")
    used = [f"zero.{key}=true" for key in keys if getattr(zero, key)]
    if used and (obstacle := op_unavailable_reason("QuantizerBuilder")) is not None:
        raise CapabilityError(f"{', '.join(used)}: {obstacle}; or use false instead")


ARCH = re.compile(r"\d+\.\d+(\+PTX)?")  # a GPU architecture that DeepSpeed can read: 9.0+PTX


def op_unavailable_reason(builder: str) -> str | None:
    """Return why the kernels that DeepSpeed's ``builder`` compiles are unavailable, or None."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops import op_builder
    from deepspeed.ops.op_builder.builder import (
        CUDAMismatchException,
        MissingCUDAException,
        assert_no_cuda_mismatch,
    )

    if not torch.cuda.is_available():
        return "DeepSpeed has these kernels for GPUs only; use a GPU, and install the CUDA toolkit"
    op = getattr(op_builder, builder)()
    if installed_ops.get(op.name):
        return None
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if any(ARCH.fullmatch(arch) is None for arch in archs.replace(";", " ").split()):
        return (
            f"DeepSpeed's kernels ({op.name}) cannot be compiled here: DeepSpeed cannot read "
            f"TORCH_CUDA_ARCH_LIST={archs}: it must be numbers, such as 9.0; unset the variable"
        )
    try:
        if not op.is_compatible(verbose=False):
            return f"DeepSpeed's kernels ({op.name}) do not fit this GPU or CUDA"
        assert_no_cuda_mismatch(op.name)
    except (MissingCUDAException, CUDAMismatchException, OSError) as error:
        return (
            f"DeepSpeed's kernels ({op.name}) cannot be compiled here: {str(error).lstrip('>- ')}; "
            "install the CUDA toolkit of the version that torch was built with (nvcc, CUDA_HOME)"
        )
    return None
