"""Read which instruction sets a run may use from the files that several CPUs show."""

import os
from pathlib import Path

import pytest

from rlhf.base.cpu import (
    MAX_ISA,
    ONEDNN_MAX_ISA,
    Cpu,
    Isa,
    can_train_fp16,
    cap_onednn_isa,
    has_slow_mkl,
    multiplies_bf16,
    read_cpu,
    usable_isa,
)
from rlhf.base.errors import CapabilityError
from rlhf.config.choices import Dtype
from rlhf.config.machine_rates import resolve_cpu_dtype

AVX2 = "fpu sse4_2 avx fma avx2"
AVX512 = f"{AVX2} avx512f avx512dq avx512bw avx512vl avx512_vnni"
# name -> (the CPU's flags; its level; whether it multiplies bf16, and fp16)
CPUS = {
    "Intel(R) Xeon(R) Platinum 8481C": (
        f"{AVX512} avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8",
        (Isa.amx, True, True),
    ),
    "AMD EPYC 9B45": (f"{AVX512} avx512_bf16", (Isa.avx512_bf16, True, False)),
    "Intel(R) Xeon(R) Gold 6338": (AVX512, (Isa.avx2, False, False)),
    "AMD EPYC 7B13": (AVX2, (Isa.avx2, False, False)),
    "Intel(R) Xeon(R) CPU E5-2670": ("fpu sse4_2 avx", (Isa.none, False, False)),
    "Intel(R) Core(TM) Ultra 7 258V": (f"{AVX2} avx_ne_convert", (Isa.avx2, False, True)),
}


def cpu_file(folder: Path, name: str, flags: str) -> Path:
    """A cpuinfo file of two equal cores."""
    core = (
        f"model name\t: {name}\ncpu family\t: 6\nmodel\t\t: 143\nstepping\t: 8\nflags\t\t: {flags}"
    )
    path = folder / "cpuinfo"
    path.write_text(f"{core}\n\n{core}\n")
    return path


@pytest.fixture(autouse=True)
def _no_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MAX_ISA, raising=False)
    monkeypatch.delenv(ONEDNN_MAX_ISA, raising=False)


@pytest.mark.parametrize(("cap", "is_slow"), [("", True), ("AVX2", True), ("SSE41", False)])
def test_mkl_is_slow_on_amd_if_onednn_may_use_avx2(
    cap: str, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ONEDNN_MAX_ISA, cap)
    flags = frozenset(AVX2.split())
    assert has_slow_mkl(Cpu("AMD EPYC 7B13 (25-1-1)", flags)) is is_slow
    assert not has_slow_mkl(Cpu("Intel(R) Core(TM) Ultra 7 258V (6-189-1)", flags))


@pytest.mark.parametrize("name", CPUS)
def test_levels_follow_from_the_flags(name: str, tmp_path: Path) -> None:
    flags, expected = CPUS[name]
    cpu = read_cpu(cpu_file(tmp_path, name, flags))
    assert cpu.name == f"{name} (6-143-8)"
    assert (usable_isa(cpu), multiplies_bf16(cpu), can_train_fp16(cpu)) == expected


ARM = "processor\t: 0\nFeatures\t: {}\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("features", "has_halves"), [("asimd asimdhp sve bf16", True), ("fp asimd crc32", False)]
)
def test_arm_names_its_features(features: str, has_halves: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(ARM.format(features))
    cpu = read_cpu(tmp_path / "cpuinfo")
    assert cpu.name.endswith(" 0x41 (0xd40)")
    assert usable_isa(cpu) is Isa.avx2
    assert multiplies_bf16(cpu) is can_train_fp16(cpu) is has_halves


def test_without_cpuinfo_nothing_is_taken_for_granted(tmp_path: Path) -> None:
    cpu = read_cpu(tmp_path / "none")
    assert (usable_isa(cpu), multiplies_bf16(cpu), can_train_fp16(cpu)) == (Isa.none, False, False)


XEON = Cpu("Xeon", frozenset(CPUS["Intel(R) Xeon(R) Platinum 8481C"][0].split()))


@pytest.mark.parametrize("level", Isa)
def test_our_cap_holds_for_kernels_precision_and_onednn(
    level: Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MAX_ISA, level.name)
    assert usable_isa(XEON) is level
    assert multiplies_bf16(XEON) is (level >= Isa.avx512_bf16)


@pytest.mark.parametrize(
    ("cap", "bf16", "fp16"),
    [
        ("AVX2", False, False),
        ("AVX512_CORE", False, False),
        ("AVX512_CORE_BF16", True, False),
        ("AVX512_CORE_FP16", True, True),
        ("AVX512_CORE_AMX", True, True),
        ("ALL", True, True),
    ],
)
def test_what_onednn_may_not_use_is_not_native(
    cap: str, monkeypatch: pytest.MonkeyPatch, *, bf16: bool, fp16: bool
) -> None:
    monkeypatch.setenv(ONEDNN_MAX_ISA, cap)
    assert (multiplies_bf16(XEON), can_train_fp16(XEON)) == (bf16, fp16)
    assert usable_isa(XEON) is Isa.amx


@pytest.mark.parametrize(
    ("cap", "onednn"), [("avx2", "AVX2"), ("none", "SSE41"), ("avx512_bf16", "AVX512_CORE_BF16")]
)
def test_onednn_is_held_to_our_cap(cap: str, onednn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_ISA, cap)
    monkeypatch.setattr("rlhf.base.cpu.read_cpu", lambda: XEON)
    monkeypatch.setattr("os.environ", {MAX_ISA: cap})
    cap_onednn_isa()
    assert os.environ[ONEDNN_MAX_ISA] == onednn


@pytest.mark.parametrize("name", CPUS)
def test_auto_is_bf16_where_the_cpu_multiplies_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, (_, bf16, fp16) = CPUS[name]
    monkeypatch.setattr("rlhf.base.cpu.read_cpu", lambda: Cpu(name, frozenset(flags.split())))
    monkeypatch.setattr("rlhf.config.machine_rates.read_cpu", lambda: Cpu(name, frozenset()))
    auto = Dtype.bf16 if bf16 else Dtype.fp32
    assert resolve_cpu_dtype(Dtype.auto) is auto
    assert [resolve_cpu_dtype(dtype) for dtype in (Dtype.bf16, Dtype.fp32)] == [
        Dtype.bf16,
        Dtype.fp32,
    ]
    if fp16:
        assert resolve_cpu_dtype(Dtype.fp16) is Dtype.fp16
        return
    with pytest.raises(CapabilityError) as refused:
        resolve_cpu_dtype(Dtype.fp16)
    assert str(refused.value) == (
        f"hardware.dtype=fp16: {name} has no fp16 arithmetic, and DeepSpeed refuses to emulate it; "
        f"use hardware.dtype=auto, which is {auto} here"
    )
