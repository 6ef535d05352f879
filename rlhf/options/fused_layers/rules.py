"""Rules for keys that fused layers need or exclude."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import Device
from rlhf.config.schema.model import refuse_compile
from rlhf.config.schema.run import RunConfig
from rlhf.options.fused_layers.keys import FusedLayers


def check(config: RunConfig) -> None:
    """Check that the run is on GPUs, and that torch.compile does not replace its layers too."""
    if config.fused_layers is FusedLayers.none:
        return
    device = config.hardware.device
    broken = {
        f"hardware.device={device}: Liger's kernels run on GPUs only; use fused_layers=none, or a "
        "GPU profile of hardware": device is not Device.cuda,
    }
    refuse_broken_rule(broken, f"fused_layers={config.fused_layers} with ")
    refuse_compile(config, f"fused_layers={config.fused_layers}, which replaces layers")
