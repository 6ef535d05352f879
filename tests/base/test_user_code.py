"""The import of a user's code, and the line that says where it failed."""

import sys
from pathlib import Path

import pytest

from rlhf.base.errors import ConfigError
from rlhf.base.isolated_process import import_user_object


def test_a_module_that_fails_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "broken_code.py"
    file.write_text("x = 1\nraise SystemExit('no')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ConfigError, match=r"some\.key=broken_code:A: .*SystemExit: no \(.*py:2\)"):
        import_user_object("some.key", "broken_code:A")
