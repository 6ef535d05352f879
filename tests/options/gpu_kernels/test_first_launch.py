"""Kernels that do not start on this machine are replaced, and the log says why."""

from __future__ import annotations

from types import ModuleType

import pytest

from rlhf.options.gpu_kernels.first_launch import load_kernels_or_warn


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("no C compiler\n  in line 3"), "no C compiler"), (OSError(), "OSError")],
)
def test_the_first_line_of_an_error_is_the_reason(
    error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> ModuleType:
        raise error

    assert load_kernels_or_warn(load, otherwise="torch decodes") is None
    assert caplog.messages == [f"No Triton for this GPU ({reason}): torch decodes"]
