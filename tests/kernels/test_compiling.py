"""Compiling C where it runs: once, and without harm where it cannot be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.kernels import compiling


def test_a_compiler_that_fails_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = Path(compiling.__file__).with_name("adamw.c")
    assert compiling._library("false", source) is None
    assert list((tmp_path / "rlhf").iterdir()) == []


def test_no_compiler_means_no_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    assert compiling.compiled.__wrapped__("adamw") is None


def test_a_library_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = compiling.shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = Path(compiling.__file__).with_name("adamw.c")
    made = compiling._library(compiler, source)
    assert made is not None
    written = made.stat().st_mtime_ns
    assert compiling._library(compiler, source) == made
    assert made.stat().st_mtime_ns == written
    assert [path.name for path in made.parent.iterdir()] == [made.name]
