"""fp16 on every CPU: torch emulates it if the CPU has none, slowly and with the same results.

``python -m tests.emulated_fp16`` is launch.py on such a CPU.
"""

import runpy
from pathlib import Path

import rlhf.config.machine_rates


def emulate_fp16() -> None:
    """Let this program and DeepSpeed take this CPU for one with fp16 arithmetic."""
    from deepspeed.accelerator import get_accelerator

    rlhf.config.machine_rates.can_train_fp16 = lambda: True
    get_accelerator().is_fp16_supported = lambda: True


if __name__ == "__main__":
    emulate_fp16()
    runpy.run_path(str(Path(__file__).parents[1] / "launch.py"), run_name="__main__")
