"""Rules for keys that fused layers need or exclude."""

from __future__ import annotations

from collections.abc import Container
from importlib.util import find_spec

from rlhf.base.errors import CapabilityError, refuse_broken_rule
from rlhf.config.choices import Device, Phase
from rlhf.config.roles import starting_models
from rlhf.config.schema.model import refuse_compile
from rlhf.config.schema.run import RunConfig
from rlhf.options.fused_layers.keys import FusedLayers


def check_fused_layers(config: RunConfig) -> None:
    """Check that the run is on GPUs, and that torch.compile does not replace its layers too."""
    if config.fused_layers is not FusedLayers.liger:
        return
    device = config.hardware.device
    broken = {
        f"hardware.device={device}: Liger's kernels run on GPUs only; use fused_layers=none, or a "
        "GPU hardware profile": device is not Device.cuda,
    }
    refuse_broken_rule(broken, f"fused_layers={config.fused_layers} with ")
    refuse_compile(config, f"fused_layers={config.fused_layers}, which replaces layers")


def check_liger_layers(config: RunConfig, phases: Container[Phase]) -> None:
    """Raise CapabilityError if Liger is not installed, or does not fit a model of ``phases``."""
    if find_spec("liger_kernel") is None:
        raise CapabilityError(
            f"fused_layers={config.fused_layers}: the package liger-kernel is not installed; "
            "pip install 'rlhf[liger]', or use fused_layers=none"
        )
    from rlhf.models.sources import config_fields
    from rlhf.options.fused_layers.liger_layers import require_fitting_layers

    for phase in config.phase.order:
        for group, model in starting_models(config, phase) if phase in phases else []:
            if fields := config_fields(model, key=group):
                require_fitting_layers(fields)
