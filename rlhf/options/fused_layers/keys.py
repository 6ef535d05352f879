"""Key for the kernels that compute the small layers of a model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlhf.config.schema.keys import EVERY_PHASE, AtResume, key

FusedLayers = StrEnum("FusedLayers", "auto none liger")
"""Kernels for norms, rotary embeddings and SwiGLU in training and scoring."""


@dataclass(kw_only=True)
class FusedLayersGroup:
    """The key ``fused_layers`` of a run."""

    fused_layers: FusedLayers = key(affects=EVERY_PHASE, at_resume=AtResume.rounding)
    """liger: norms, rotary embeddings and SwiGLU by Liger's kernels, on GPUs; none: by torch; auto:
    by Liger where it is installed, fits the model and computes what torch does."""
