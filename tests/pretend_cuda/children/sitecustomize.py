"""Python imports this module at its start, where __main__.py has put its folder on the path.

A process gets its GPU when it imports torch: one that does not import it starts as fast as ever.
"""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from tests.pretend_cuda.gpu import load
from tests.pretend_cuda.machine import MACHINES, NAME, pretend, replace_driver

MACHINE = MACHINES[os.environ[NAME]]


class _BeforeTorch(MetaPathFinder):
    """Loads the library before torch, and starts the GPU after it."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Return the spec of torch with a longer import; None for any other module."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        load()
        spec = find_spec("torch")
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_start(module: ModuleType) -> None:
            execute(module)
            pretend(MACHINE)

        spec.loader.exec_module = execute_and_start  # type: ignore[method-assign]
        return spec


replace_driver(MACHINE.driver, setattr)
sys.meta_path.insert(0, _BeforeTorch())
