"""Compile C where it runs: once for each CPU, and without harm if it cannot be done."""

import ctypes
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf.base import cpu
from rlhf.base.cpu import MAX_ISA, Isa, read_cpu
from rlhf.kernels.cpu import compiling
from rlhf.kernels.cpu.compiling import (
    LOWEST_ISA,
    compile_kernel,
    describe_kernels,
    load_kernel,
)

NO_GCC = "there is no C compiler; install gcc"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is loaded or compiled yet, and no cap is set."""
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(MAX_ISA, raising=False)
    load_kernel.cache_clear()
    yield
    load_kernel.cache_clear()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """Make a script the only program on the PATH."""

    def only(name: str, script: str) -> None:
        path = tmp_path / "bin" / name
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(path.parent))

    return only


needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None or read_cpu().isa is Isa.none, reason="no gcc, or no AVX2"
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the library of AdamW."""
    cache = tmp_path_factory.mktemp("compiled") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_CACHE", str(cache))
        load_kernel.cache_clear()
        assert compile_kernel("adamw") is not None
    return cache


@pytest.fixture
def library(compiled: Path, tmp_path: Path) -> Path:
    """The library of AdamW in this test's cache."""
    shutil.copytree(compiled, tmp_path / "cache")
    (library,) = (tmp_path / "cache").iterdir()
    return library


@needs_gcc
def test_a_library_is_made_once_and_then_needs_no_compiler(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    own = compile_kernel("adamw")
    assert own._name == str(library)


@needs_gcc
@pytest.mark.parametrize("place", ["the library", "its folder"])
def test_a_library_that_another_user_could_write_is_not_loaded(place: str, library: Path) -> None:
    (library if place == "the library" else library.parent).chmod(0o777)
    again = compile_kernel("adamw")
    assert again._name != str(library), "compiled again, for this process only"


@needs_gcc
def test_nothing_is_compiled_in_a_folder_of_others(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)  # a link under the name of the new file would be followed
    assert compile_kernel("adamw") is not None
    assert list((tmp_path / "cache").iterdir()) == []


@needs_gcc
def test_others_of_the_group_cannot_write_a_new_library(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        assert compile_kernel("adamw") is not None
    finally:
        os.umask(before)
    (library,) = (tmp_path / "cache").iterdir()
    assert [oct(path.stat().st_mode & 0o777) for path in (library, library.parent)] == 2 * ["0o755"]


@needs_gcc
def test_cpus_that_share_a_home_keep_their_own(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = read_cpu()
    monkeypatch.setattr(compiling, "read_cpu", lambda: here._replace(name="another CPU"))
    assert compile_kernel("adamw") is not None
    assert len(list(library.parent.iterdir())) == 2


@pytest.mark.parametrize("level", Isa)
def test_kernels_above_the_cap_are_not_loaded(level: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_ISA, level.name)
    for name, needed in LOWEST_ISA.items():
        if needed > level:
            assert compile_kernel(name) is None
            assert load_kernel(name, level).reason == f"RLHF_MAX_CPU_ISA={level.name}"


def test_arm_has_adamw_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = cpu.Cpu("Neoverse", frozenset({"asimd"}))
    for module in (cpu, compiling):
        monkeypatch.setattr(module, "read_cpu", lambda: arm)
    monkeypatch.setenv("PATH", "")
    assert load_kernel("decode", Isa.avx2) == (None, "needs an x86 CPU")
    assert load_kernel("adamw", Isa.avx2) == (None, NO_GCC)


@needs_gcc
def test_without_amx_by_linux_the_next_level_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    if read_cpu().isa < Isa.avx512_bf16:
        pytest.skip("this CPU has no AVX-512 for bf16")

    class Refused:
        def decode_enable(self) -> int:
            return 0

    load = compiling._load_library
    monkeypatch.setattr(
        compiling, "_load_library", lambda *of: Refused() if of[1] is Isa.amx else load(*of)
    )
    found = load_kernel("decode", Isa.amx)
    assert found.reason == "Linux does not let this process use AMX"
    assert isinstance(found.library, ctypes.CDLL)
    monkeypatch.setattr(compiling, "usable_isa", lambda: Isa.amx)
    monkeypatch.setattr(compiling, "LOWEST_ISA", {"decode": Isa.avx2})
    assert (
        describe_kernels(half=True)
        == f"kernels: decode in C (amx); no amx for decode: {found.reason}"
    )


@needs_gcc
def test_what_an_old_compiler_does_not_know_is_done_at_the_next_level(
    compiler: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler(
        "gcc",
        'case "$*" in *ISA=AVX512*) echo "error: what is bf16?" >&2; exit 1;; esac\n'
        f'PATH={shlex.quote(os.environ["PATH"])} exec gcc "$@"',
    )
    found = load_kernel("decode", Isa.avx512_bf16)
    assert isinstance(found.library, ctypes.CDLL)
    failed = f"{tmp_path}/bin/gcc failed with exit code 1 (error: what is bf16?)"
    assert found.reason == failed
    monkeypatch.setattr(compiling, "usable_isa", lambda: Isa.avx512_bf16)
    monkeypatch.setattr(compiling, "LOWEST_ISA", {"decode": Isa.avx2})
    assert describe_kernels(half=True) == (
        f"kernels: decode in C (avx512_bf16); no avx512_bf16 for decode: {failed}"
    )


def test_the_threads_of_clang_are_not_mixed_with_those_of_torch(
    compiler: Callable[[str, str], None],
) -> None:
    compiler("cc", "echo Debian clang version 19.1.7")
    reason = load_kernel("adamw", Isa.avx2).reason
    assert reason is not None
    assert "bin/cc is not gcc" in reason


def test_a_compiler_that_fails_leaves_nothing(
    compiler: Callable[[str, str], None], tmp_path: Path
) -> None:
    gnu = 'echo "Copyright (C) 2022 Free Software Foundation, Inc."'
    compiler(
        "gcc", f'[ "$1" = --version ] && {gnu} || {{ echo "x: fatal error: no" >&2; exit 3; }}'
    )
    failed = f"{tmp_path}/bin/gcc failed with exit code 3 (x: fatal error: no)"
    assert load_kernel("adamw", Isa.avx2) == (None, failed)
    assert list((tmp_path / "cache").iterdir()) == []


@needs_gcc
def test_a_mount_that_may_not_be_executed_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load = ctypes.CDLL

    def noexec(path: str) -> ctypes.CDLL:
        if path.startswith(str(tmp_path)):
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(ctypes, "CDLL", noexec)
    assert compile_kernel("adamw") is not None
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    load_kernel.cache_clear()
    reason = load_kernel("adamw", Isa.avx2).reason
    assert reason.startswith(f"{tmp_path}/cache cannot hold compiled code (failed to map segment")
    assert "set RLHF_CACHE to a folder" in reason
