"""Run launch.py and write its modules to a file: ``python -m tests.loaded_modules FILE WORDS``."""

import runpy
import sys
from pathlib import Path

from tests.runs import ROOT

if __name__ == "__main__":
    file, *words = sys.argv[1:]
    sys.argv = ["launch.py", *words]
    try:
        runpy.run_path(str(ROOT / "launch.py"), run_name="__main__")
    finally:
        Path(file).write_text("\n".join(sys.modules))
