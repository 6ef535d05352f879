"""Every instruction set that this CPU has computes the same; without kernels, torch does.

test_decode.py has the steps of a forward pass, test_logprobs.py draws and log-probabilities.
"""

from rlhf.base.cpu import Isa
from rlhf.kernels.cpu.compiling import LOWEST_ISA, load_kernel


def test_the_kernels_of_a_level_run(isa: Isa) -> None:
    for name, needed in LOWEST_ISA.items():
        assert (load_kernel(name, isa).library is not None) is (isa >= needed), load_kernel(
            name, isa
        ).reason
