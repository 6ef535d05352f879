"""Run launch.py with kernels that are broken on purpose, on the emulated GPU.

Triton's interpreter runs the kernels, if TRITON_INTERPRET=1. Each of them gives wrong numbers or
does not compile, and CUDA graphs compute nothing.
"""

import runpy
from typing import Any

from tests.kernels.gpu.interpreted import import_triton_again


def main() -> None:
    """Break the kernels, and launch."""
    import_triton_again()
    from rlhf.kernels.gpu.adamw_gpu import ParameterTable
    from rlhf.kernels.gpu.attention_gpu import GpuAttention
    from rlhf.kernels.gpu.logprobs_gpu import GpuLogprobKernel
    from tests.pretend_cuda.torch_cuda import Graph
    from tests.runs import ROOT

    step, attend = ParameterTable.step, GpuAttention.__call__

    def step_twice_the_rate(self: Any, states: Any, gradients: Any, numbers: Any) -> None:
        step(self, states, gradients, [each._replace(lr=2 * each.lr) for each in numbers])

    def attend_too_much(self: Any, *tensors: Any) -> Any:
        return 1.1 * attend(self, *tensors)

    def do_not_compile(*_: Any, **__: Any) -> None:
        raise RuntimeError("at 7:12: cannot compile\n    total += p")

    ParameterTable.step = step_twice_the_rate
    GpuAttention.__call__ = attend_too_much
    GpuLogprobKernel._launch = do_not_compile
    Graph.replay = lambda _: None
    runpy.run_path(str(ROOT / "launch.py"), run_name="__main__")


if __name__ == "__main__":
    main()
