"""The Triton kernels that launchers name exist: names are read as text, without Triton."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[3] / "rlhf/options/gpu_kernels"
LAUNCHERS = ("adamw", "attention", "logprobs")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_launched_kernel_exists(name: str) -> None:
    launcher = (KERNELS / f"{name}_gpu.py").read_text()
    launched = set(re.findall(r'_launch\(\s*"(\w+)"|_kernels\.(\w+)\[', launcher))
    launched = {each for pair in launched for each in pair if each}
    module = ast.parse((KERNELS / f"{name}_triton.py").read_text())
    kernels = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    assert launched
    assert launched <= kernels
