"""Whether Triton's kernels run on this GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType

logger = logging.getLogger(__name__)


def try_kernels(load: Callable[[], ModuleType], *, otherwise: str) -> ModuleType | None:
    """Return the kernels of ``load``, which imports and launches them; log if they do not run.

    Then the result is None and ``otherwise``, the consequence, is in the log. Triton comes with
    torch's CUDA wheels. It needs a C compiler, Python's headers, a folder for its cache and a
    driver, and has a different error for each. Torch's operations need none of them.
    """
    try:
        return load()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        logger.warning("No Triton for this GPU (%s): %s", reason, otherwise)
        return None
