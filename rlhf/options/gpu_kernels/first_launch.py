"""Test Triton's kernels on this GPU before a run uses them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType

logger = logging.getLogger(__name__)


def load_kernels_or_warn(load: Callable[[], ModuleType], *, otherwise: str) -> ModuleType | None:
    """Return the module that ``load`` returns after a test launch, or None if ``load`` raises.

    In that case log a warning with the reason and the consequence, ``otherwise``. Triton comes
    with torch's CUDA wheels. Unlike torch's own operations, Triton needs a C compiler, Python's
    headers, a cache folder and a driver, and raises a different error if one is missing.
    """
    try:
        return load()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        logger.warning("No Triton for this GPU (%s): %s", reason, otherwise)
        return None
