"""What needs DeepSpeed's own CUDA kernels is refused where nvcc cannot compile them."""

from pathlib import Path

import pytest
import torch
import torch.utils.cpp_extension

from rlhf.base.errors import CapabilityError
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.run import RunConfig
from rlhf.phases.shared.preflight import require_capabilities
from tests.conftest import Compose
from tests.pretend_cuda.gpu import Gpu


def config_of(compose: Compose, *words: str) -> RunConfig:
    return to_run_config(compose(["hardware=8xa100_40g", *words]))


def give_nvcc(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str) -> None:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", str(folder))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "words",
    [
        ["zero=stage3", "zero.quantize_weights=true"],
        ["zero=stage3", "zero.quantize_gradients=true"],
        ["rollout=hybrid_engine"],
    ],
    ids=lambda words: words[-1],
)
def test_kernels_need_the_compiler_of_torchs_cuda(
    words: list[str], compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(compose, *words)
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None)
    with pytest.raises(CapabilityError, match="CUDA_HOME does not exist"):
        require_capabilities(config)
    give_nvcc(monkeypatch, tmp_path, "12.4")
    with pytest.raises(CapabilityError, match=r"CUDA version 12\.4 does not match .* 13\.0"):
        require_capabilities(config)


def test_the_right_compiler_is_enough_and_other_runs_need_none(
    gpu: Gpu, compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None)
    require_capabilities(config_of(compose, "zero=stage3"))
    give_nvcc(monkeypatch, tmp_path, "13.0")
    require_capabilities(config_of(compose, "zero=stage3", "zero.quantize_weights=true"))
